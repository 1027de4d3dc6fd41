"""Accelerate's own `save_state`, `load_state` and `merge_fsdp_weights` with FSDP2 in shards, on CPU ranks.

One thing of Accelerate is changed, see `accelerate_on_cpu`: which devices it believes FSDP to be for.
"""

import errno
import os

import pytest

import functional_ckpt
from tests.effects import Refusal, watched
from tests.programs.setting import (
    LIMIT_S,
    STORAGES,
    Death,
    accelerate_on_cpu,
    as_torchrun,
    doomed,
    pool,
    shown,
    storing,
    whole,
)

pytestmark = pytest.mark.mp

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def train(storage, folder, size, steps, *, load=False, death=None, first=0):
    """Train `steps` steps and save after each to the same folder; return what a resumed run must equal."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    as_torchrun(size)
    accelerate_on_cpu()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(first)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3))
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    rates = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
    model, adam, rates = accelerator.prepare(model, adam, rates)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    with storing(storage), doomed(death, accelerator, "save_state"):
        if load:
            accelerator.load_state(str(folder))
        for _ in range(steps):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            adam.step()
            rates.step()
            adam.zero_grad()
            accelerator.save_state(str(folder))
    return state_of(model, adam, rates)


def state_of(model, adam, rates):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return {
        "model": whole(get_model_state_dict(model)),
        "optimizer": whole(get_optimizer_state_dict(model, adam.optimizer)),
        "rate": rates.scheduler.state_dict(),
    }


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("size", [2, 4])
def test_a_run_that_goes_on_equals_one_that_never_stopped(two, four, size, storage, tmp_path, same):
    """Each step is saved to the folder of the one before."""
    ranks = {2: two, 4: four}[size]
    unbroken = ranks.run(train, storage, tmp_path / "unbroken", size, 4, limit_s=LIMIT_S)
    ranks.run(train, storage, tmp_path / "run", size, 2, limit_s=LIMIT_S)
    resumed = ranks.run(go_on, storage, tmp_path / "run", size, 2, limit_s=LIMIT_S)
    same(resumed, unbroken)
    if storage == "ours":
        check_ours(tmp_path / "run", resumed[0], same)


def go_on(storage, folder, size, steps):
    """Begin with other values, so that what is not loaded is seen."""
    return train(storage, folder, size, steps, load=True, first=1)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def check_ours(folder, state, same):
    assert all(name in (MODEL, OPTIMIZER) or (folder / name).is_file() for name in names(folder))
    for name, kind in ((MODEL, "model"), (OPTIMIZER, "optimizer")):
        assert functional_ckpt.verify(folder / name).ok
        found = functional_ckpt.open_checkpoint(folder / name).state("torch")[kind]
        expected = state[kind]
        same(*((found, dict(expected)) if kind == "model" else (found["state"], expected["state"])))


@pytest.mark.parametrize("storage", STORAGES)
def test_other_numbers_of_ranks_take_up(two, four, storage, tmp_path, same):
    saved = two.run(train, storage, tmp_path, 2, 2, limit_s=LIMIT_S)[0]
    copy_random_states(tmp_path)
    same(four.run(go_on, storage, tmp_path, 4, 0, limit_s=LIMIT_S)[0], saved)


def copy_random_states(folder):
    """Accelerate loads a file per rank, whatever holds the tensors."""
    for rank in (2, 3):
        (folder / f"random_states_{rank}.pkl").write_bytes((folder / "random_states_0.pkl").read_bytes())


@pytest.mark.parametrize("storage", STORAGES)
def test_merged_weights_are_the_model(two, storage, tmp_path, same):
    """One rank merges while the others wait, in the process group that trained."""
    from safetensors.torch import load_file

    saved = two.run(train, storage, tmp_path / "run", 2, 2, limit_s=LIMIT_S)[0]
    two.run(merge, storage, tmp_path / "run" / MODEL, tmp_path / "merged", limit_s=LIMIT_S)
    same(load_file(tmp_path / "merged" / "model.safetensors"), dict(saved["model"]))


def merge(storage, folder, to):
    from accelerate.utils import merge_fsdp_weights

    as_torchrun(2)
    accelerate_on_cpu()
    from accelerate.state import PartialState

    PartialState(cpu=True)
    with storing(storage):
        merge_fsdp_weights(str(folder), str(to))


@pytest.fixture(scope="module")
def steps(two, tmp_path_factory):
    """What is held after step 2 and after step 3."""
    folder = tmp_path_factory.mktemp("steps")
    return [two.run(train, "stock", folder / f"{count}", 2, count, limit_s=LIMIT_S)[0] for count in (2, 3)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
def test_after_a_death_model_and_optimizer_are_each_whole(two, steps, rank, share, tmp_path, same):
    """Killed while it saves step 3 over step 2. Accelerate saves two checkpoints: each is the old or the new one."""
    with pool(2) as ranks:
        outcomes = ranks.outcomes(train_until_death, tmp_path, rank, share, limit_s=LIMIT_S)
    assert outcomes[rank].dead
    assert outcomes[1 - rank].error is not None
    found = two.run(go_on, "ours", tmp_path, 2, 0, limit_s=LIMIT_S)[0]
    assert all(any(is_same(same, found[kind], step[kind]) for step in steps) for kind in ("model", "optimizer"))
    two.run(go_on, "ours", tmp_path, 2, 1, limit_s=LIMIT_S)
    functional_ckpt.sweep(tmp_path)
    assert names(tmp_path) == [OPTIMIZER, MODEL, "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"]


def is_same(same, one, other):
    try:
        same(one, other)
    except AssertionError:
        return False
    return True


def train_until_death(folder, rank, share):
    mine = int(os.environ["TEST_RANK"]) == rank
    return train("ours", folder, 2, 4, death=Death(folder, 3, share) if mine else None)


@pytest.mark.parametrize("at", [0, 9])
def test_after_a_save_that_fails_on_one_rank_the_next_goes_through(two, at, tmp_path):
    """The disk of rank 1 is full for one call; both hear of it, keep what they had, and save again."""
    two.run(train, "ours", tmp_path, 2, 1, limit_s=LIMIT_S)
    for told, values in two.run(fail_and_save_again, tmp_path, at, limit_s=LIMIT_S):
        assert "refused" in told
        assert values == [1.0, 2.0]
    assert functional_ckpt.verify(tmp_path / MODEL).ok


def fail_and_save_again(folder, at):
    """Return what was said of the failed save, and what is loaded before and after the next."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    as_torchrun(2)
    accelerate_on_cpu()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    weights = torch.nn.Linear(6, 10)
    model, _ = accelerator.prepare(weights, torch.optim.SGD(weights.parameters(), lr=0.1))
    values = []
    with storing("ours"):
        fill(model, 1)
        accelerator.save_state(str(folder))
        fill(model, 2)
        full = Refusal(at if accelerator.process_index else -1, "once", errno.ENOSPC)

        def handle(call):  # what Accelerate does itself, alone, is no save of ours
            return full(call) if ".saving" in str(call.paths) else call.do()

        with watched(folder, handle), pytest.raises(BaseException) as caught:  # noqa: PT011 - DCP's is no Exception
            accelerator.save_state(str(folder))
        for _ in range(2):
            values += [read(accelerator, model, folder)]
            fill(model, 2)
            accelerator.save_state(str(folder))
    return str(caught.value), values


def fill(model, value):
    import torch

    with torch.no_grad():
        for each in model.parameters():
            each.fill_(value)


def read(accelerator, model, folder):
    """Return what is loaded into a model that held something else."""
    fill(model, 9)
    accelerator.load_state(str(folder))
    return model.weight.full_tensor().unique().item()


def test_what_the_page_shows(tmp_path, same):
    """Run twice: the second run loads what the first has saved."""
    from safetensors.torch import load_file

    with pool(2) as ranks:
        seen = [ranks.run(as_shown, tmp_path, limit_s=LIMIT_S)[0] for _ in range(2)]
    assert seen[1]["before"] == seen[0]["after"] == 1.0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {key: tensor.unique().tolist() for key, tensor in merged.items()} == {"weight": [2.0], "bias": [2.0]}
    assert names(tmp_path / "steps") == ["1", "2"]
    assert all(functional_ckpt.verify(tmp_path / "steps" / step / MODEL).ok for step in "12")


def as_shown(folder):
    import torch

    seen = {}

    def train(_accelerator, model, _optimizer):
        value = model.weight.full_tensor().unique().tolist()[0]
        seen["before"], seen["after"] = value, value + 1
        with torch.no_grad():
            for each in model.parameters():
                each.add_(1)
        return int(value) + 1

    as_torchrun(2)
    accelerate_on_cpu()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    model = torch.nn.Linear(4, 2)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.AdamW(model.parameters())
    shown("program_accelerate.py", folder, model=model, optimizer=optimizer, train=train)
    return seen
