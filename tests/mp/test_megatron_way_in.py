"""The first lines of the page for Megatron's users, in an unmodified megatron-core 0.16: how our format gets in."""

import os
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
    pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")

from tests import pages  # noqa: E402
from tests.mp.test_megatron import check, run, state, until_016  # noqa: E402, F401 - a fixture

pytestmark = [pytest.mark.mp, until_016]


def shown(name="megatron_016.py"):
    return SimpleNamespace(**pages.shown("megatron.md", name))


def saves(rank, path):
    shown().save(state(rank)[0], str(path))


def loads(rank, path):
    wanted, want = state(rank, 1, fill=False)
    check(shown().load(wanted, str(path)), want, rank)


def loads_without_the_import(rank, path):
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.core import CheckpointingException

    with pytest.raises(CheckpointingException, match="Cannot find a default strategy"):
        mcore.load(state(rank, 1, fill=False)[0], str(path))


def test_what_the_page_shows_saves_and_loads(run):  # noqa: F811
    path = run(saves)
    assert not [*path.glob("*.distcp")]
    run(loads)
    run(loads_without_the_import)


def training(rank, path):
    """Call what `megatron.training` 0.16 calls, through the page's function; its `save_checkpoint` stands in here."""
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    queue = AsyncCallsQueue()

    def save_checkpoint(iteration, model, optimizer, scheduler, flops, checkpointing_context):
        place = path / f"iter_{iteration:07d}"
        place.mkdir(exist_ok=True)
        torch.distributed.barrier()
        request = mcore.save(
            model, str(place), checkpointing_context["save_strategy"], async_sharded_save=optimizer,
            validate_access_integrity=iteration == 1, preprocess_common_before_consistancy_check=None,
            content_metadata={"iteration": iteration},
        )  # fmt: skip
        if request is not None:
            queue.schedule_async_request(request)

    module = ModuleType("megatron.training.checkpointing")
    module.save_checkpoint = save_checkpoint
    sys.modules["megatron.training"], sys.modules[module.__name__] = ModuleType("megatron.training"), module
    save = shown("megatron_training.py").save
    for iteration, in_background in enumerate((False, True, True), 1):
        save(iteration, state(rank)[0], in_background, None)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    for iteration in (1, 2, 3):
        place = str(path / f"iter_{iteration:07d}")
        wrapper = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(place), torch.distributed.group.WORLD, exchange_algo="gather_object"
        )
        wanted, want = state(rank, 1, fill=False)
        found = mcore.load(wanted, place, wrapper, strict="log_all")
        assert found["content_metadata"] == {"iteration": iteration}
        check(found, want, rank)


def test_the_calls_of_megatron_training(run):  # noqa: F811
    run(training)


def registered(rank, path):
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.strategies.base import (
        StrategyAction,
        get_default_strategy,
        register_default_strategy,
    )

    from functional_ckpt.torch.megatron.plugin import ZarrSaveStrategy

    register_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1, ZarrSaveStrategy())
    assert not isinstance(get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1), ZarrSaveStrategy)
    mcore.save(state(rank)[0], str(path))


def test_a_default_for_torch_dist_is_lost(run):  # noqa: F811
    pytest.importorskip("psutil", reason="what Megatron's own strategy needs")
    path = run(registered)
    assert [*path.glob("*.distcp")]
    assert not (path / "zarr.json").exists()


def changing(rank, path):
    from megatron.core import dist_checkpointing as mcore

    def whole():
        held = state(rank)[0]
        del held["rng"]  # whose name its own strategy cannot read back
        return held

    pages = shown()
    for place, save in ((path / "old", mcore.save), (path / "new", pages.save)):
        os.makedirs(place, exist_ok=True)
        torch.distributed.barrier()
        save(whole(), str(place))
    for place in ("old", "new"):
        wanted, want = state(rank, fill=False)
        del wanted["rng"]
        found = pages.load(wanted, str(path / place))
        assert torch.equal(found["w"], want["w"])
        assert found["step"] == 3


def test_a_run_changes_over_between_two_saves(run):  # noqa: F811
    pytest.importorskip("psutil", reason="what Megatron's own strategy needs")
    run(changing)
