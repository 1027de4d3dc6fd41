"""Conversion of DCP's write items to the input of a save: specs of shards, plain values, and their buffers."""

import io
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from functional_ckpt.errors import ShapeError, SpecError, UnsupportedLeafError
from functional_ckpt.run.capture import Captured, Describer
from functional_ckpt.run.leaves import HeldArray
from functional_ckpt.run.objects import object_bytes, trust_needed
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.array import known_spec
from functional_ckpt.spec.shard import known_shard
from functional_ckpt.spec.tree import DictKey, Path, unflatten
from functional_ckpt.store.values import plain_text
from functional_ckpt.torch.dcp.bridge import SavePlan, WriteItem, is_bytes, is_whole, tree_path, written_box
from functional_ckpt.torch.dcp.resolving import PlannedBuffer, Resolver

__all__ = ["captured_plan"]


def captured_plan(
    plan: SavePlan, planner: Any, rank: int, policy: SavePolicy, policy_text: str, compares: bool
) -> Captured:
    """Describe the items that a rank is to write; the data are taken from `planner` item by item.

    `compares`: every rank that has a whole tensor or object still has its item, and these are compared.

    Raises
    ------
    CheckpointError
        All items that cannot be saved, at once.
    """
    seen, resolver = Describer(rank, policy, compares), Resolver(planner, rank)
    paths = _tidy_paths([item.index.fqn for item in plan.items], plan.planner_data)
    for item in plan.items:
        add = _add_object if is_bytes(item) else _add_tensor
        seen.guard(item.index.fqn, add, seen, resolver, item, paths[item.index.fqn])
    return seen.captured(policy_text)


def _add_tensor(seen: Describer, resolver: Resolver, item: WriteItem, path: Path) -> None:
    found, (shape, box) = resolver.resolved(item), written_box(item)
    key = item.index.fqn
    if found.shape != box.shape:
        raise ShapeError(
            "the planner gives a tensor of another shape than it planned",
            key,
            rank=seen.rank,
            shape=shape,
            offset=box.start,
            expected=box.shape,
            found=found.shape,
        )
    # The data type is that of the tensor, not of the plan: a cached plan may have an outdated one.
    spec = known_spec(key, shape, found.dtype)
    own = resolver.makes_tensors
    buffer = PlannedBuffer(resolver, item, (found.shape, found.dtype)) if own else found.buffer
    # By key: a tensor that the planner makes anew may have the address of an earlier one.
    region = HeldArray(spec, (buffer,), is_whole(item), key, shards=() if is_whole(item) else (known_shard(spec, box),))
    seen.add_array(key, path, region)


def _add_object(seen: Describer, resolver: Resolver, item: WriteItem, path: Path) -> None:
    key, held = item.index.fqn, resolver.value(item)
    data = b"" if held is not None else _bytes_of(resolver.data(item))
    found = _plain(data) if held is None else held
    text = None if found is None else plain_text(found[0])
    if text is not None:
        seen.add_text(key, path, text)
        return
    encoded = np.frombuffer(data, np.uint8) if held is None else object_bytes(key, held[0])
    if seen.policy.object_codec is None:
        trust_needed(key, encoded)  # first: a PerRank is an error under any policy
        raise UnsupportedLeafError(
            "a value is neither a tensor nor plain",
            key,
            rank=seen.rank,
            remedy="Pass SavePolicy(object_codec='torch'), which is the default of ZarrStorageWriter",
        )
    seen.add_bytes(key, path, encoded, seen.policy.object_codec)


def _bytes_of(stream: Any) -> bytes:
    return stream.getvalue() if isinstance(stream, io.BytesIO) else bytes(stream.read())


def _plain(data: bytes) -> tuple[Any] | None:
    """Return the value in a stream of ``torch.save`` if it consists of plain types only."""
    try:
        value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # not plain: it is saved as bytes
        return None
    return (value,)


def _tidy_paths(keys: Iterable[str], planner_data: Any) -> dict[str, Path]:
    """Return the paths of keys. Where a list has gaps, since DCP drops empty dicts, its positions become dict keys.

    All that the planner has mapped counts, not only the items that were left to this rank.
    """
    mapped = planner_data if isinstance(planner_data, dict) else {}
    paths = {key: tree_path(key, mapped) for key in dict.fromkeys((*mapped, *keys)) if isinstance(key, str)}
    if _has_gaps(tuple(paths.values())):
        paths = {
            key: tuple(DictKey(item) if isinstance(item, int) else item for item in path) for key, path in paths.items()
        }
    return paths


@lru_cache(maxsize=4)
def _has_gaps(paths: tuple[Path, ...]) -> bool:
    """Tell whether no tree has these paths: of a state that is saved again and again that is found out once."""
    try:
        unflatten((path, None) for path in paths)
    except SpecError:
        return True
    return False
