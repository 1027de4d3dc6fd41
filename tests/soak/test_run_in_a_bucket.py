"""`examples/train_resume.py` in an object store: killed on four ranks, resumed on two, compared with a run on disk."""

import os
import re
import subprocess
import sys

import pytest

from functional_ckpt import verify
from functional_ckpt.store.steps import find_steps, step_path
from tests.pages import DOCS, ROOT
from tests.soak.resume import TOLERANCE, World
from tests.stores.conftest import server, upstream, url  # noqa: F401 - fixtures
from tests.stores.servers import free_port, program

pytest.importorskip("torch")
STEPS = 12
#: What ranks wait for one another: a loaded machine and a slow server, where nobody waits for a dead rank.
PATIENCE_S = 1800


@pytest.fixture(scope="session")
def losses(tmp_path_factory):
    """Return the losses, by step, of a run that is never killed."""
    whole = World(tmp_path_factory.mktemp("whole"), 4, STEPS, PATIENCE_S)
    assert whole.finish() == [0] * 4, whole.log.read_text()
    return whole.losses()


def test_a_killed_run_resumes_from_a_bucket(server, url, losses):  # noqa: F811
    if not server.heeds_conditions:
        pytest.skip("the example does not say that it is alone")
    root = url.rpartition("/")[0]
    first = World(root, 4, STEPS, PATIENCE_S)
    first.wait_for(8)
    for rank in first.ranks:
        rank.kill()
    first.finish()
    done = first.losses()
    second = World(root, 2, STEPS, PATIENCE_S)
    assert second.finish() == [0] * 2, second.log.read_text()
    resumed = second.losses()
    assert min(resumed) > 1, "it began anew"
    assert {**done, **resumed}.keys() == losses.keys() == {*range(1, STEPS + 1)}
    for step, loss in {**done, **resumed}.items():
        assert abs(loss - losses[step]) < TOLERANCE, step
    steps = find_steps(root)
    assert STEPS in steps
    assert all(verify(step_path(root, step)).ok for step in steps)


# The first run is told to stop; both are shorter.
_PRELUDE = """
trap 'kill $(jobs -p)' EXIT
python() { :; }
moto_server() { "$MOTO_SERVER" "$@"; }
functional-ckpt() { "$PYTHON" -m functional_ckpt.cli "$@"; }
torchrun() {
    "$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 "$@" \\
        --steps 12 --patience 1800 > "$LOGS/$2.log" 2>&1 &
    local run=$!
    if [ "$2" = 4 ]; then
        until grep -q "^step 6 " "$LOGS/4.log"; do kill -0 $run; sleep 0.1; done
        kill -TERM $run
        wait $run || true
    else
        wait $run
    fi
}
"""


def test_the_commands_of_the_page(upstream, tmp_path):  # noqa: F811
    if upstream[0] != "moto":
        pytest.skip("the page starts moto")
    page = (DOCS / "object-stores.md").read_text()
    commands = re.search(r"^```sh\n(.*?train_resume\.py s3:.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    for written, ours in (("5000", str(free_port())), ("moto.log", '"$LOGS/moto.log"'), ("00200", "00012")):
        assert written in commands
        commands = commands.replace(written, ours)
    given = {"MOTO_SERVER": program("moto_server"), "PYTHON": sys.executable, "LOGS": str(tmp_path)}
    done = subprocess.run(["bash", "-euc", _PRELUDE + commands], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, **given, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done
    assert "model.blocks.0.attention.key.bias" in done.stdout
    first, *_, last = [int(step) for step in re.findall(r"(?m)^step (\d+) ", (tmp_path / "2.log").read_text())]
    assert first > 3, "it began anew"
    assert last == 12
