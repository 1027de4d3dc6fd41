"""The common and the sharded half of a checkpoint: never of two saves, whatever is killed when, and never in the way.

A save as Megatron makes it (``common.pt`` in place, then the strategy, then ``metadata.json`` in place), and our own,
over a checkpoint that is there, killed after each of its effects. Run as a program, this file is the victim.
"""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import functional_ckpt  # noqa: E402
from functional_ckpt.errors import CheckpointError  # noqa: E402
from functional_ckpt.torch.mapping import ShardedObject, ShardedTensor  # noqa: E402
from functional_ckpt.torch.serialization import load, load_common_state_dict, save  # noqa: E402
from functional_ckpt.torch.strategies.zarr import (  # noqa: E402
    ZarrLoadShardedStrategy,
    ZarrSaveCommonStrategy,
    ZarrSaveShardedStrategy,
)
from tests.effects import EFFECTS, REAL, watched  # noqa: E402

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


def megatron_saves(path, step, background=False):
    """Do what ``megatron.core.dist_checkpointing.save`` does with a strategy of ours."""
    buffer = io.BytesIO()
    torch.save({"step": step}, buffer)
    write_in_place(path / "common.pt", buffer.getvalue())
    strategy = ZarrSaveShardedStrategy(policy=FAST)
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


CASES = {
    "megatron": (megatron_saves, megatron_saves),
    "megatron background": (megatron_saves, lambda path, step: megatron_saves(path, step, True)),
    "ours": (ours_saves, ours_saves),
    "ours background": (ours_saves, lambda path, step: ours_saves(path, step, True)),
    "megatron over ours": (ours_saves, megatron_saves),
    "ours over megatron": (megatron_saves, ours_saves),
}
#: Whether a checkpoint is there before.
BEFORE = {"over one": True, "fresh": False}


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
    assert not [name for name in os.listdir(path) if name.startswith(".") and name != ".common"]
    return found[1]


def victim(root, case, before):
    """Fork a saver per effect; effect n is done half if it is a write, else not at all, and nothing after it."""
    old_saves, saves = CASES[case]
    for at in range(1000):
        path = root / str(at)
        path.mkdir()
        if before:
            child = os.fork()  # what has started a thread must not fork
            if not child:
                old_saves(path, 1)
                os._exit(0)
            os.waitpid(child, 0)
        child = os.fork()
        if not child:
            seen = iter(range(10**6))

            def stop(call, at=at, seen=seen):
                if call.name in EFFECTS and next(seen) == at:
                    if call.name == "write":
                        file, data = call.arguments
                        REAL["write"](file, bytes(data)[: len(data) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return call.do()

            with watched(path, stop):
                saves(path, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print(at)
            return


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("case", CASES)
def test_killed_after_each_effect(case, before, tmp_path):
    command = [sys.executable, "-m", "tests.test_halves", str(tmp_path), case, before]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    count = int(done.stdout)
    assert count > 15, "the effects are no longer seen"
    found = [check(tmp_path / str(at), CASES[case][1]) for at in range(count + 1)]
    assert found == [*[step for step in found if step == 1], *[0] * found.count(0), *[2] * found.count(2)]
    assert set(found) == {int(BEFORE[before]), 0, 2}
    assert found[-1] == 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    victim(Path(sys.argv[1]), sys.argv[2], BEFORE[sys.argv[3]])
