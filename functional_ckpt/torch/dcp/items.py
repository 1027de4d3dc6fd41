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
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import known_shard
from functional_ckpt.spec.tree import DictKey, Path, unflatten
from functional_ckpt.store.values import plain_text
from functional_ckpt.torch.dcp.bridge import SavePlan, is_bytes, is_whole, tree_path, written_box
from functional_ckpt.torch.dcp.packed import Items, planned_items
from functional_ckpt.torch.dcp.resolving import Resolver
from functional_ckpt.torch.dcp.results import PackedResults, results_of

__all__ = ["captured_plan"]


def captured_plan(
    plan: SavePlan, planner: Any, rank: int, policy: SavePolicy, policy_text: str, compares: bool
) -> tuple[Captured, PackedResults]:
    """Describe the items that a rank is to write, and their results; the data are taken from `planner` item by item.

    `compares`: every rank that has a whole tensor or object still has its item, and these are compared.

    Raises
    ------
    CheckpointError
        All items that cannot be saved, at once.
    """
    seen, resolver, items = Describer(rank, policy, compares), Resolver(planner, rank), planned_items(plan)
    paths = _tidy_paths(items.names, plan.planner_data)
    adds = [_add_object if is_bytes(first) else _Tensors().add for first in items.first]
    for number, (name, form) in enumerate(zip(items.names, items.which, strict=True)):
        seen.guard(name, adds[form], seen, resolver, items, number, paths[name])
    captured = seen.captured(policy_text)
    return captured, results_of(items, _nbytes(items, captured))


def _nbytes(items: Items, captured: Captured) -> list[int]:
    """Return the bytes of each item; 0 for a value that goes into the manifest."""
    specs = {leaf.key: leaf.spec for leaf in captured.common.arrays}
    sizes = [None if is_bytes(first) else written_box(first)[1].size for first in items.first]
    found: list[int] = []
    for name, form in zip(items.names, items.which, strict=True):
        spec, size = specs.get(name), sizes[form]
        found.append(0 if spec is None else spec.nbytes if size is None else size * spec.itemsize)
    return found


class _Tensors:
    """Adds tensors of one form; what they have in common is found with the first of them."""

    def __init__(self) -> None:
        self._known: tuple[tuple[int, ...], Box, tuple[int, ...], bool] | None = None

    def add(self, seen: Describer, resolver: Resolver, items: Items, number: int, path: Path) -> None:
        key = items.names[number]
        known = self._known
        if known is None:
            item = items.item(number)
            shape, box = written_box(item)
            known = self._known = shape, box, box.shape, is_whole(item)
        shape, box, extent, whole = known
        found, dtype, buffer = resolver.held(items, number)
        if found != extent:
            raise ShapeError(
                "the planner gives a tensor of another shape than it planned",
                key,
                rank=seen.rank,
                shape=shape,
                offset=box.start,
                expected=extent,
                found=tuple(found),
            )
        # The data type is that of the tensor, not of the plan: a cached plan may have an outdated one.
        spec = known_spec(key, shape, dtype)
        # By key: a tensor that the planner makes anew may have the address of an earlier one.
        region = HeldArray(spec, (buffer,), whole, key, shards=() if whole else (known_shard(spec, box),))
        seen.add_array(key, path, region)


def _add_object(seen: Describer, resolver: Resolver, items: Items, number: int, path: Path) -> None:
    item = items.item(number)
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
