"""Saves over a checkpoint in Megatron's layout, as Megatron makes them and as we do, and what must be there afterwards.

Run as a program, this file is the victim: it is killed after each effect of each save.
"""

import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import functional_ckpt  # noqa: E402
from functional_ckpt.errors import (  # noqa: E402
    CheckpointError,
)
from functional_ckpt.torch.megatron import halves  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedObject, ShardedTensor  # noqa: E402
from functional_ckpt.torch.megatron.serialization import (  # noqa: E402
    load,
    load_common_state_dict,
    save,
)
from functional_ckpt.torch.megatron.strategies.zarr import (  # noqa: E402
    ZarrLoadShardedStrategy,
    ZarrSaveCommonStrategy,
    ZarrSaveShardedStrategy,
)
from tests.effects import killing_at, watched  # noqa: E402

ONLY = functional_ckpt.LoadPolicy(strict=functional_ckpt.Strict(unexpected="ignore"))
FAST = functional_ckpt.SavePolicy(durability="none")
tensor = ShardedTensor.from_rank_offsets


def sharded(step):
    # Another key at each step, so that arrays come and go.
    held = {"w": torch.full((5, 3), step), "bias": torch.arange(7) + step, f"only.{step}": torch.ones(2)}
    return {key: tensor(key, data) for key, data in held.items()} | {"rng": ShardedObject("rng", [step], (1,), (0,))}


def wanted():
    return {"w": tensor("w", torch.zeros(5, 3, dtype=torch.int64)), "rng": ShardedObject("rng", None, (1,), (0,)),
            "bias": tensor("bias", torch.zeros(7, dtype=torch.int64))}  # fmt: skip


def write_in_place(path, data):
    """Write a file as Megatron does: the old content is gone before the new one is there."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.write(file, data)
    os.close(file)


def megatron_saves(path, step, background=False, common=None):
    """Do what ``megatron.core.dist_checkpointing.save`` does with a strategy of ours."""
    buffer = io.BytesIO()
    torch.save(common or {"step": step}, buffer)
    write_in_place(path / "common.pt", buffer.getvalue())
    strategy = ZarrSaveShardedStrategy(policy=FAST, common_file="common.pt")
    if background:
        strategy.async_save(sharded(step), path).execute_sync()
    else:
        strategy.save(sharded(step), path)
    config = {"sharded_backend": strategy.backend, "sharded_backend_version": strategy.version,
              "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
    write_in_place(path / "metadata.json", json.dumps(config).encode())


def ours_saves(path, step, background=False):
    strategies = ZarrSaveShardedStrategy(policy=FAST), ZarrSaveCommonStrategy(policy=FAST)
    request = save({**sharded(step), "step": step}, path, *strategies, async_sharded_save=background)
    if background:
        request.execute_sync()


def without_exchange(path, step):
    """Save on a file system that cannot exchange directories."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "_can_be_exchanged", lambda _: False)
        megatron_saves(path, step)


#: Who has saved what lies there (nobody: it is empty), and who saves over it.
CASES = {
    "megatron": (megatron_saves, megatron_saves),
    "megatron background": (megatron_saves, lambda path, step: megatron_saves(path, step, True)),
    "ours": (ours_saves, ours_saves),
    "ours background": (ours_saves, lambda path, step: ours_saves(path, step, True)),
    "megatron over ours": (ours_saves, megatron_saves),
    "ours over megatron": (megatron_saves, ours_saves),
    "megatron without exchange": (megatron_saves, without_exchange),
    "megatron fresh": (None, megatron_saves),
    "ours fresh": (None, ours_saves),
}


def megatron_loads(path):
    """Return the steps of both halves, as ``megatron.core.dist_checkpointing.load`` reads them."""
    config = json.loads((path / "metadata.json").read_text())  # without it: no distributed checkpoint
    if config["common_backend"] != "torch":
        return ours_loads(path)
    common = torch.load(path / "common.pt", weights_only=True)
    return common["step"], halves_of(ZarrLoadShardedStrategy().load(wanted(), path))


def ours_loads(path):
    found = load(wanted(), path, validate_access_integrity=False)
    assert load_common_state_dict(path)["step"] == found["step"]
    return found["step"], halves_of(found)


def halves_of(found):
    (step,) = found["rng"]
    assert torch.equal(found["w"], torch.full((5, 3), step))
    assert torch.equal(found["bias"], torch.arange(7) + step)
    return step


# What Megatron's own reading of a torn file may raise.
REFUSALS = (CheckpointError, FileNotFoundError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError,
            zipfile.BadZipFile)  # fmt: skip


def step_there(path, loads):
    """Return the step of the checkpoint at a path, 0 if it is refused; fail if it is of two."""
    try:
        common, of_tensors = loads(path)
    except REFUSALS:
        return 0
    assert common == of_tensors, f"the common half is of step {common}, the tensors of step {of_tensors}"
    return common


def check(path, saves):
    """What is there is of one save, also for all who read the tensors only; and the next save works."""
    found = [step_there(path, loads) for loads in (megatron_loads, ours_loads)]
    try:
        alone = functional_ckpt.open_checkpoint(path)
        assert functional_ckpt.verify(path).ok
        assert {int(x) for x in alone["w"][...].ravel()} == {int(alone["bias"][0])}
    except CheckpointError:
        pass
    assert found[0] in (0, found[1]), "what Megatron loads, ours loads"
    saves(path, 3)
    assert [megatron_loads(path), ours_loads(path)] == [(3, 3), (3, 3)]
    assert sorted(functional_ckpt.open_checkpoint(path)) == ["bias", "only.3", "rng/shard_0_1", "w"]
    functional_ckpt.sweep(path.parent)
    assert os.listdir(path.parent) == ["a"]
    assert not [name for name in os.listdir(path) if name.startswith(".") and name != ".common"]
    return found[1]


def forked(function, *arguments):
    """Run in a child (what has started a thread must not fork) and return how it has ended."""
    child = os.fork()
    if not child:
        function(*arguments)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(saves, path, at):
    """Save, and die at effect `at`, which is done half if it is a write, else not at all."""
    with watched(path.parent, killing_at(at)):
        saves(path, 2)


def victim(root, step):
    """For each case and every `step`-th effect of its save leave what is there if it dies then; say where that ends."""
    counts = {}
    for number, (case, (before, saves)) in enumerate(CASES.items()):
        old = root / f"before {case}"
        old.mkdir()
        if before:
            assert forked(before, old, 1) == 0
        for at in range(number % step, 1000, step):  # cases begin elsewhere
            path = root / case / str(at) / "a"
            shutil.copytree(old, path)
            ended = forked(killed, saves, path, at)
            if ended != -signal.SIGKILL:
                assert ended == 0
                counts[case] = at
                break
    print(json.dumps(counts))


def left_by_victims(root, step):
    """Return the last effect of each case."""
    command = [sys.executable, "-m", "tests.halves", str(root), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2000, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_case(case, root, last):
    """Check what is there after each kill."""
    before, saves = CASES[case]
    places = sorted((int(path.name), path) for path in (root / case).iterdir())
    assert places[-1][0] == last > 15, "the effects are no longer seen"
    found = [check(path / "a", saves) for _, path in places]
    order = [1, 0, 2] if before else [0, 2]
    assert found == sorted(found, key=order.index), "what is withdrawn does not come back, what is published stays"
    assert set(found) - {1} == {0, 2}
    assert found[-1] == 2


STEP = 11


if __name__ == "__main__":
    torch.set_num_threads(1)
    victim(Path(sys.argv[1]), int(sys.argv[2]))
