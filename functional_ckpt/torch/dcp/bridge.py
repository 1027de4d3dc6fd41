"""The bridge to ``torch.distributed.checkpoint``: the one module that imports it, and makes its values.

Differences between versions of torch are detected here: names and fields that some versions lack.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from functional_ckpt.errors import SpecError, UnsupportedLeafError
from functional_ckpt.plan.manifest import Manifest, RankItem
from functional_ckpt.plan.record import canonical
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.tree import DictKey, Path
from functional_ckpt.store.values import decode_value, encode_value, is_plain
from functional_ckpt.torch.host_view import TORCH_DTYPES
from functional_ckpt.torch.object_codec import dump

__all__ = [
    "BytesStorageMetadata", "ChunkStorageMetadata", "DefaultLoadPlanner", "DefaultSavePlanner", "Future", "LoadPlan",
    "LoadPlanner", "Members", "Metadata", "MetadataIndex", "ReadItem", "SavePlan", "SavePlanner", "StorageMeta",
    "StorageReader", "StorageWriter", "Streamed", "TensorProperties", "TensorStorageMetadata", "TensorWriteData",
    "WriteItem", "WriteResult", "byte_item",
    "chunk_of", "done", "is_bytes", "is_whole", "metadata_of", "paths", "planned", "read_box", "read_item", "stamp",
    "stored_metadata", "tree_path", "with_planner_data", "with_storage_data", "write_item", "write_result",
    "written_box",
]  # fmt: skip

_METADATA_VERSION = "1.0.0"
#: Of a checkpoint: what DCP's metadata holds and the manifest has no place for.
_ATTRIBUTE = "torch.distributed.checkpoint"
_PLAIN_STEPS = frozenset([str, int])
_EMPTY_DICTS = ("{}", '{"~ordered":[]}')


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return a region of a global tensor as DCP describes it.

    Examples
    --------
    >>> chunk_of(Box((0, 2), (4, 6)))
    ChunkStorageMetadata(offsets=torch.Size([0, 2]), sizes=torch.Size([4, 4]))
    """
    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))


def write_item(
    name: str, box: Box, global_shape: tuple[int, ...], dtype: torch.dtype, hint: int | None, whole: bool = False
) -> WriteItem:
    """Return DCP's item that writes region `box` of the tensor `name`; `hint` is its position among the local ones.

    With `whole` it is a plain tensor rather than a shard.

    Examples
    --------
    >>> write_item("w", Box((2,), (4,)), (6,), torch.float32, None).index.offset
    torch.Size([2])
    """
    return WriteItem(
        index=MetadataIndex(name, torch.Size(box.start), hint),
        type=WriteItemType.TENSOR if whole else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk_of(box), properties=TensorProperties(dtype=dtype), size=torch.Size(global_shape)
        ),
    )


def byte_item(name: str) -> WriteItem:
    """Return DCP's item that writes an object.

    Examples
    --------
    >>> is_bytes(byte_item("step"))
    True
    """
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)


def read_item(name: str, box: Box, target: Box, source: Box, number: int = 0) -> ReadItem:
    """Return DCP's item that reads `box`: part of the stored chunk `source`, into local chunk `target` number `number`.

    All three are in global coordinates.

    Examples
    --------
    >>> item = read_item("w", Box((3,), (5,)), Box((2,), (6,)), Box((0,), (8,)))
    >>> item.dest_offsets, item.storage_offsets
    (torch.Size([1]), torch.Size([3]))
    """
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, torch.Size(target.start), number),
        dest_offsets=torch.Size(box.relative_to(target).start),
        storage_index=MetadataIndex(name, torch.Size(source.start), 0),
        storage_offsets=torch.Size(box.relative_to(source).start),
        lengths=torch.Size(box.shape),
    )


def is_bytes(item: WriteItem | ReadItem) -> bool:
    """Tell whether an item is for an object rather than for a tensor."""
    return item.type in (WriteItemType.BYTE_IO, LoadItemType.BYTE_IO)


def is_whole(item: WriteItem) -> bool:
    """Tell whether an item is for a plain tensor, which each of its ranks holds whole.

    Examples
    --------
    >>> is_whole(write_item("w", Box((), ()), (), torch.float32, None, whole=True))
    True
    """
    return bool(item.type == WriteItemType.TENSOR)


def written_box(item: WriteItem) -> tuple[tuple[int, ...], Box]:
    """Return the global shape and the region of a tensor's item.

    Examples
    --------
    >>> written_box(write_item("w", Box((2,), (4,)), (6,), torch.float32, None))
    ((6,), Box(start=(2,), stop=(4,)))
    """
    data = item.tensor_data
    if data is None:
        raise SpecError("a write item of a tensor lacks its tensor_data", item.index.fqn)
    return tuple(data.size), _known_box(tuple(data.chunk.sizes), tuple(data.chunk.offsets))


_known_box = lru_cache(maxsize=1024)(Box.from_shape)


def read_box(item: ReadItem) -> Box:
    """Return the region of the global tensor that an item reads.

    Examples
    --------
    >>> read_box(read_item("w", Box((3,), (5,)), Box((2,), (6,)), Box((0,), (8,))))
    Box(start=(3,), stop=(5,))
    """
    origin = item.storage_index.offset or (0,) * len(item.lengths)
    start = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
    return _known_box(tuple(item.lengths), start)


def with_storage_data(plan: SavePlan, data: Any) -> SavePlan:
    """Return a plan with `data`, which DCP sends to the other ranks.

    Examples
    --------
    >>> with_storage_data(SavePlan([]), 3).storage_data
    3
    """
    return replace(plan, storage_data=data)


def write_result(item: WriteItem, nbytes: int) -> WriteResult:
    """Return the write result of one item.

    Examples
    --------
    >>> write_result(byte_item("step"), 8).size_in_bytes
    8
    """
    return WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=None)


def done(value: Any) -> Any:
    """Return a future that holds `value` already.

    Examples
    --------
    >>> done(3).value()
    3
    """
    future: Any = Future()
    future.set_result(value)
    return future


def stored_metadata(manifest: Manifest, url: str | None) -> Metadata:
    """Return DCP's metadata of a checkpoint: one chunk per tensor, however many ranks have saved it.

    Examples
    --------
    >>> stored_metadata(Manifest(), None).state_dict_metadata
    {}
    """
    # DCP does not treat an empty dict as a leaf.
    values = [value for value in manifest.values if value.text not in _EMPTY_DICTS]
    found: dict[str, Any] = {value.key: BytesStorageMetadata() for value in values}
    for key, entry in manifest.by_key.items():
        found[key] = _tensor_metadata(entry.spec) if entry.codec is None else BytesStorageMetadata()
    kept = json.loads(manifest.attributes).get(_ATTRIBUTE)
    data = decode_value(kept["planner_data"]) if isinstance(kept, dict) and "planner_data" in kept else paths(manifest)
    metadata = Metadata(state_dict_metadata=found, planner_data=data)
    stamp(metadata, url)
    return metadata


def _tensor_metadata(spec: ArraySpec) -> TensorStorageMetadata:
    origin, size = _bounds(spec.shape)
    # Whoever got the metadata may change it: each tensor has its own chunk.
    chunk = ChunkStorageMetadata(origin, size)
    return TensorStorageMetadata(TensorProperties(TORCH_DTYPES[spec.dtype]), size, [chunk])


# Thousands of tensors have the same shape.
@lru_cache(maxsize=1024)
def _bounds(shape: tuple[int, ...]) -> tuple[torch.Size, torch.Size]:
    return torch.Size((0,) * len(shape)), torch.Size(shape)


def paths(manifest: Manifest) -> dict[str, tuple[Any, ...]]:
    """Return the paths of all keys as DCP's planner keeps them.

    Examples
    --------
    >>> from functional_ckpt.plan.manifest import ValueEntry
    >>> paths(Manifest(values=(ValueEntry("a.0", "3", ("a", 0)),)))
    {'a.0': ('a', 0)}
    """
    values = [value for value in manifest.values if value.text not in _EMPTY_DICTS]
    placed = [(e.spec.key, e.path) for e in manifest.arrays]
    placed += [(value.key, value.path) for value in values]
    placed += [(alias.key, alias.path) for alias in manifest.aliases]
    return {key: _object_path(key, path) for key, path in placed}


def with_planner_data(manifest: Manifest, data: Any) -> Manifest:
    """Return a manifest with the planner's data from the metadata, unless these are only the paths of keys.

    Raises
    ------
    UnsupportedLeafError
        If the data are not plain values: nothing is pickled.

    Examples
    --------
    >>> kept = with_planner_data(Manifest(), ["of mine"])
    >>> stored_metadata(kept, None).planner_data
    ['of mine']
    """
    known = paths(manifest)
    if data is None or (isinstance(data, dict) and all(known.get(key) == path for key, path in data.items())):
        return manifest
    if not is_plain(data):
        raise UnsupportedLeafError(
            "the planner's data are not plain values",
            "planner_data",
            found=type(data).__name__,
            remedy="Use dicts, lists, tuples, text and numbers",
        )
    attributes = {**json.loads(manifest.attributes), _ATTRIBUTE: {"planner_data": encode_value(data)}}
    return attrs.evolve(manifest, attributes=canonical(attributes))


def metadata_of(plans: Iterable[SavePlan]) -> Metadata:
    """Return DCP's metadata of all items in `plans`: one chunk per tensor.

    Examples
    --------
    >>> metadata_of([SavePlan([byte_item("step")])]).state_dict_metadata
    {'step': BytesStorageMetadata()}
    """
    found: dict[str, Any] = {}
    for item in (item for plan in plans for item in plan.items):
        data = item.tensor_data
        if data is None:
            found[item.index.fqn] = BytesStorageMetadata()
            continue
        chunk = chunk_of(Box.from_shape(tuple(data.size)))
        found[item.index.fqn] = TensorStorageMetadata(properties=data.properties, size=data.size, chunks=[chunk])
    return Metadata(state_dict_metadata=found)


def stamp(metadata: Metadata, url: str | None) -> None:
    """Fill in the fields of the storage: its address, an (empty) index, and the version if the field exists."""
    metadata.storage_data = {}
    metadata.storage_meta = StorageMeta(checkpoint_id=url)
    if any(field == "version" for field in getattr(metadata, "__dataclass_fields__", {})):
        metadata.version = _METADATA_VERSION


def planned(metadata: Metadata) -> Iterator[tuple[str, Any]]:
    """Yield key and offset of everything that a save has planned; objects have no offset.

    Examples
    --------
    >>> list(planned(metadata_of([SavePlan([byte_item("step")])])))
    [('step', None)]
    """
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            yield from ((key, chunk.offsets) for chunk in stored.chunks)
        else:
            yield key, None


def tree_path(key: str, planner_data: Any) -> Path:
    """Return the path of a flattened key, as the planner kept it; the key itself where it kept none.

    Examples
    --------
    >>> tree_path("a.0", {"a.0": ("a", 0)}), tree_path("a.0", None)
    (('a', 0), ('a.0',))
    """
    path = planner_data.get(key) if isinstance(planner_data, Mapping) else None
    return path if isinstance(path, tuple) and path and _is_plain(path) else (key,)


def _is_plain(path: tuple[Any, ...]) -> bool:
    return _PLAIN_STEPS.issuperset(map(type, path))


class Streamed(io.BytesIO):
    """A value as the stream that load planners expect. `ZarrStorageReader` makes it and has checked its classes.

    Examples
    --------
    >>> torch.load(Streamed((1, 2)))
    (1, 2)
    """

    def __init__(self, value: Any) -> None:
        super().__init__(dump("", value).tobytes())


def _object_path(key: str, path: Iterable[Any] | None) -> tuple[Any, ...]:
    if path is None:
        return (key,)
    path = tuple(path)
    return (path if _is_plain(path) else tuple(map(_component, path))) or (key,)


def _component(item: Any) -> str | int:
    if isinstance(item, DictKey | RankItem):
        return str(item.value) if isinstance(item, DictKey) else str(item)
    return item if isinstance(item, int) else str(item)


@attrs.frozen
class Members:
    """The ranks that save together, by their numbers in the default group; DCP sends it with the plans.

    `save_id` names the save, once all ranks of it have sent their plans.
    """

    ranks: tuple[int, ...]
    save_id: str | None = None
