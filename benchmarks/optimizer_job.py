"""What each rank does for `benchmarks.optimizer`: saves and loads of the state of a distributed optimizer."""

import gc
import logging
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist

from benchmarks.group import gathered, timed_by_all
from benchmarks.measure import rotated
from benchmarks.place import Place, footprint
from benchmarks.ranks_job import Peak, Times
from benchmarks.rss import peak_extra_nbytes
from functional_ckpt import SavePolicy
from functional_ckpt.torch.megatron.distributed_optimizer import load_optimizer_state, sharded_optimizer_state
from functional_ckpt.torch.megatron.serialization import load, save
from functional_ckpt.torch.megatron.strategies.zarr import ZarrSaveShardedStrategy
from tests.mp.cpu_as_cuda import pretend
from tests.mp.megatron_training import gpt

#: Tensor and pipeline parallel sizes on four ranks.
LAYOUTS = {"TP2 DP2": (2, 1), "TP1 DP4": (1, 1), "PP2 DP2": (1, 2), "TP2 PP2 DP1": (2, 2)}
SAVED = "TP2 DP2"
OURS_FLAT = "ours, flat shards"
WARM_HIDDEN = 64


@attrs.frozen
class Size:
    """How large the model is, and how often it is saved."""

    hidden: int
    vocabulary: int
    rounds: int


class Training:
    """A model of bfloat16 and its optimizer, every element of whose state is known from its key and place."""

    def __init__(self, layout: str, size: Size) -> None:
        sizes = {"hidden_size": size.hidden, "vocabulary": size.vocabulary, "bucket": 4_000_000}
        self.ddp, self.optimizer = gpt(*LAYOUTS[layout], torch.bfloat16, **sizes)
        self.model = self.ddp.module.sharded_state_dict()
        self.shards = sharded_optimizer_state(self.optimizer, self.model)["shards"]

    def fill(self) -> None:
        """Give every element its value."""
        for shard in self.shards:
            shard.data.copy_(_values(shard))

    def blank(self) -> None:
        """Overwrite everything."""
        for shard in self.shards:
            shard.data.fill_(-1.0)

    def wrong(self) -> int:
        """Return how many elements of all ranks do not have their value."""
        return sum(gathered(sum(int((shard.data != _values(shard)).sum()) for shard in self.shards)))

    @property
    def nbytes(self) -> int:
        return sum(shard.data.numel() * shard.data.element_size() for shard in self.shards)


@attrs.frozen
class Format:
    """Calls that all ranks make together."""

    name: str
    save: Callable[[Training, Path], object]
    load: Callable[[Training, Path], object]


def _save_ours(training: Training, path: Path) -> None:
    strategy = ZarrSaveShardedStrategy(policy=SavePolicy(durability="none"))
    save({"optimizer": sharded_optimizer_state(training.optimizer, training.model)}, path, strategy)


def _load_ours(training: Training, path: Path) -> None:
    found = load({"optimizer": sharded_optimizer_state(training.optimizer, training.model)}, path)
    load_optimizer_state(training.optimizer, found["optimizer"])


def _save_theirs(kind: str, training: Training, path: Path) -> None:
    from megatron.core import dist_checkpointing as mcore
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    state = training.optimizer.sharded_state_dict(training.model, metadata={"distrib_optim_sharding_type": kind})
    path.mkdir(exist_ok=True)
    dist.barrier()
    mcore.save({"optimizer": state}, str(path), strategy)


def _load_theirs(kind: str, training: Training, path: Path) -> None:
    from megatron.core import dist_checkpointing as mcore

    wanted = training.optimizer.sharded_state_dict(
        training.model, is_loading=True, metadata={"distrib_optim_sharding_type": kind}
    )
    found = mcore.load({"optimizer": wanted}, str(path))["optimizer"]
    if kind == "dp_reshardable":
        training.optimizer.load_state_dict(found)
        return
    # In 0.16.1 the other format fails on the step that torch's Adam keeps per parameter; Transformer Engine's does not.
    whole = found.pop("param_state")
    training.optimizer.load_state_dict(found)
    (part,) = training.optimizer.chained_optimizers
    steps = [state.pop("step") for state in part.optimizer.state.values()]
    part.load_parameter_state_from_fully_reshardable(whole)
    for state, step in zip(part.optimizer.state.values(), steps, strict=True):
        state["step"] = step


FORMATS = {
    OURS_FLAT: Format(OURS_FLAT, _save_ours, _load_ours),
    **{
        kind: Format(kind, partial(_save_theirs, kind), partial(_load_theirs, kind))
        for kind in ("dp_reshardable", "fully_reshardable")
    },
}


def measure_times(place: Place, size: Size) -> Times:
    """Save and load by all formats in turn, after one save and load of each that prove it."""
    with _megatron():
        training = Training(SAVED, size)
        times = Times({}, {name: [] for name in FORMATS}, {name: [] for name in FORMATS})
        for number in range(-1, size.rounds):
            for name in rotated(list(FORMATS), number + 1):
                training.fill()
                path = _fresh_path(place)
                saved = timed_by_all(partial(FORMATS[name].save, training, path))
                saved = attrs.evolve(saved, left=footprint(path))
                training.blank()
                loaded = timed_by_all(partial(FORMATS[name].load, training, path))
                if training.wrong():
                    raise RuntimeError(f"{name} did not load what was saved")
                if number >= 0:
                    times.saves[name].append(saved)
                    times.loads[name].append(loaded)
                _discard(place, path)
        return times


def measure_peaks(place: Place, name: str, size: Size) -> tuple[Peak, Peak]:
    """Return the peaks of a save and a load, in processes that have saved and loaded a small state before."""
    with _megatron():
        one, path = FORMATS[name], _fresh_path(place)
        small = Training(SAVED, attrs.evolve(size, hidden=WARM_HIDDEN, vocabulary=512))
        one.save(small, path)
        one.load(small, path)
        _discard(place, path)
        training, path = Training(SAVED, size), _fresh_path(place)
        training.fill()
        peaks = [_peak(partial(call, training, path), training.nbytes) for call in (one.save, one.load)]
        _discard(place, path)
        return peaks[0], peaks[1]


def keep_one_save(path: Path, name: str, size: Size) -> None:
    """Save the state under the first layout."""
    with _megatron():
        training = Training(SAVED, size)
        training.fill()
        FORMATS[name].save(training, path)


def try_load(path: Path, name: str, layout: str, size: Size) -> int:
    """Load under another layout; return how many elements of all ranks are wrong then."""
    with _megatron():
        training = Training(layout, size)
        training.blank()
        try:
            FORMATS[name].load(training, path)
        except BaseException as error:  # DCP's is no Exception, and would be lost
            text = " ".join(str(error).split())
            raise RuntimeError(f"{type(error).__name__}: {text[:200]}") from None
        return training.wrong()


@contextmanager
def _megatron() -> Iterator[None]:
    """Megatron without a GPU, without its warnings, and, like all here, without syncing files."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"), mock.patch.object(os, "fsync"):
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        pretend()
        yield
        # Megatron keeps a queue in a process of its own, which would outlive the ranks.
        filesystem_async._results_queue = None
        gc.collect()


def _values(shard: Any) -> torch.Tensor:
    """Return what a flat shard is to hold: numbers of elements of the global tensor, shifted by the key."""
    numbers = torch.full((1,) * len(shard.global_shape), zlib.crc32(shard.key.encode()))
    local_shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    for axis, count in enumerate(local_shape):
        stride = torch.Size(shard.global_shape[axis + 1 :]).numel()
        along = (torch.arange(count) + shard.global_offset[axis]) * stride
        numbers = numbers + along.reshape(-1, *(1,) * (len(local_shape) - axis - 1))
    # Whole numbers that float32 can hold.
    return (numbers.reshape(-1)[shard.flattened_range] % 2**23).float()


def _peak(run: Callable[[], object], own: int) -> Peak:
    peaks = [Peak(*found) for found in gathered((peak_extra_nbytes(run), own))]
    return max(peaks, key=lambda peak: peak.extra_nbytes)


def _fresh_path(place: Place) -> Path:
    return Path(gathered(str(place.fresh_path()) if dist.get_rank() == 0 else None)[0])


def _discard(place: Place, path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        place.discard(path, files=0)
