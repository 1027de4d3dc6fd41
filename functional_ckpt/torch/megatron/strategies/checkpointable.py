"""Sharded tensors that ``torch.distributed.checkpoint`` saves and loads by itself, with any storage.

Both classes are tensor subclasses with the global shape, on which no operation works. DCP gets a list of pieces, each a
region of the global tensor with a view of the local one: one piece per shard, several for a range of a flattened shard.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch

from functional_ckpt.errors import ShapeError, SpecError
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import fragments
from functional_ckpt.torch.dcp.bridge import ChunkStorageMetadata, MetadataIndex, WriteItem, chunk_of, write_item
from functional_ckpt.torch.megatron.exceptions import LeafAssertionError, SpecAssertionError
from functional_ckpt.torch.megatron.sharded_tensor import ShardedTensor

__all__ = ["CheckpointableShardedTensor", "LocalShardsContainer"]

_Piece = tuple[Box, torch.Tensor]


class CheckpointableShardedTensor(torch.Tensor):
    """One shard as a value of a state dict for ``torch.distributed.checkpoint.save`` and ``load``.

    Parameters
    ----------
    data
        The local tensor; filled in place by a load.
    sh_ten
        Its place in the global tensor. DCP uses the key of the state dict, not `sh_ten.key`.

    Attributes
    ----------
    global_shape, global_offsets, local_offsets, local_sizes
        The pieces, as torch 2.14 and later look for them.

    Raises
    ------
    CheckpointingException
        If `data` is None or does not have the shape of the shard; the error names the key.

    Examples
    --------
    >>> shard = ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (0, 1, 3))
    >>> CheckpointableShardedTensor.from_sh_ten(shard).size()
    torch.Size([6, 4])
    """

    _data: torch.Tensor
    _sh_ten: ShardedTensor
    _pieces: tuple[_Piece, ...]

    def __new__(cls, data: torch.Tensor, sh_ten: ShardedTensor) -> "CheckpointableShardedTensor":
        """Return a tensor of the global shape without memory."""
        if not isinstance(data, torch.Tensor):
            raise SpecError(
                "a shard has no data",
                sh_ten.key,
                shape=tuple(sh_ten.global_shape),
                found=type(data).__name__,
                remedy="Call its init_data first",
            )
        return cast("CheckpointableShardedTensor", _wrapper(cls, sh_ten.global_shape, data))

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:
        self._data, self._sh_ten = data, sh_ten
        self._pieces = _pieces(data, sh_ten)
        _publish(self, self._pieces)

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> "CheckpointableShardedTensor":
        """Return a sharded tensor and its data as one value.

        Raises
        ------
        CheckpointingException
            If it is not a `ShardedTensor` (an ``AssertionError`` too), or has no data.
        """
        if not isinstance(sh_ten, ShardedTensor):
            raise LeafAssertionError(
                "this is not a sharded tensor", expected="ShardedTensor", found=type(sh_ten).__name__
            )
        return cls(sh_ten.data, sh_ten)  # type: ignore[arg-type] # None is refused there

    def __create_write_items__(
        self, fqn: str, sh_ten: "CheckpointableShardedTensor", index: int | None = None
    ) -> list[WriteItem]:
        """Return DCP's write items for the pieces; `index` is the position of the first among all on this rank."""
        return _write_items(fqn, self, self._pieces, index)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the regions of the pieces."""
        return [chunk_of(box) for box, _ in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the local memory of the piece at `index`; if there is only one piece, `index` is ignored.

        Raises
        ------
        CheckpointingException
            If there are several pieces and none is at the offset; a ``ValueError`` too.
        """
        return self._pieces[0][1] if len(self._pieces) == 1 else _found(self._pieces, index)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> NoReturn:
        """Raise: a shard does not support operations.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError(f"{func}: {cls.__name__} has no values to compute with")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._sh_ten!r})"


class LocalShardsContainer(torch.Tensor):
    """All shards of one global tensor that this rank holds, as one value for DCP, which needs one value per key.

    Parameters
    ----------
    local_shards
        `CheckpointableShardedTensor` of one key.

    Attributes
    ----------
    global_shape, global_offsets, local_offsets, local_sizes
        The pieces, as torch 2.14 and later look for them.

    Raises
    ------
    CheckpointingException
        If there are no shards, one has another type (an ``AssertionError`` too), or they differ in key, global shape or
        data type.

    Examples
    --------
    >>> rows = [ShardedTensor.from_rank_offsets("w", torch.ones(1, 4), (0, i, 3)) for i in (0, 2)]
    >>> container = LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(row) for row in rows])
    >>> container.global_offsets
    ((0, 0), (2, 0))
    """

    _local_shards: list[CheckpointableShardedTensor]
    _pieces: tuple[_Piece, ...]

    def __new__(cls, local_shards: list[torch.Tensor]) -> "LocalShardsContainer":
        """Return a tensor of the global shape without memory."""
        if not local_shards:
            raise SpecAssertionError("a container needs at least one shard")
        for shard in local_shards:
            if not isinstance(shard, CheckpointableShardedTensor):
                raise LeafAssertionError(
                    "a container holds shards only", found=type(shard).__name__, expected="CheckpointableShardedTensor"
                )
        first = local_shards[0]
        for shard in local_shards[1:]:
            _check_same(first, shard)  # type: ignore[arg-type] # checked above
        return cast("LocalShardsContainer", _wrapper(cls, first.shape, first))

    def __init__(self, local_shards: list[CheckpointableShardedTensor]) -> None:
        self._local_shards = local_shards
        self._pieces = tuple(piece for shard in local_shards for piece in shard._pieces)
        _publish(self, self._pieces)

    def __create_write_items__(self, fqn: str, local_shards_cont: "LocalShardsContainer") -> list[WriteItem]:
        """Return DCP's write items for the pieces of all shards, in their order."""
        return _write_items(fqn, self, self._pieces, 0)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the regions of the pieces of all shards, in their order."""
        return [chunk_of(box) for box, _ in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the local memory of the piece at the offset of `index`.

        Raises
        ------
        CheckpointingException
            If `index` has no offset, or no piece is there; a ``ValueError`` too.
        """
        return _found(self._pieces, index)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise: shards do not support operations.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError(f"{func}: {cls.__name__} has no values to compute with")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._local_shards!r})"


def _wrapper(cls: type, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)


def _pieces(data: torch.Tensor, sh_ten: ShardedTensor) -> tuple[_Piece, ...]:
    """Return the shard's regions of the global tensor with views of `data`.

    An empty shard has none, unless the whole tensor is empty: DCP distinguishes the pieces of several ranks by their
    offset alone, so an empty piece could displace another; but a tensor without pieces would not be stored.
    """
    shard = sh_ten.spec
    expected = shard.box.shape[sh_ten.prepend_axis_num :] if shard.flat is None else (shard.size,)
    if tuple(data.shape) != expected:
        raise ShapeError(
            "the local tensor has another shape than its shard",
            shard.key,
            shape=shard.array.shape,
            offset=shard.box.start,
            expected=expected,
            found=tuple(data.shape),
        )
    found: list[_Piece] = []
    for fragment in fragments(shard):
        if shard.flat is None:
            found.append((fragment.box, _with_axes(data, sh_ten.prepend_axis_num)))
        else:
            run = data.detach()[fragment.run : fragment.run + fragment.box.size]
            found.append((fragment.box, run.view(fragment.box.shape)))
    if not found and not shard.array.box.size:
        found.append((shard.box, data.detach().reshape(shard.box.shape)))
    return tuple(found)


def _with_axes(data: torch.Tensor, count: int) -> torch.Tensor:
    return data.detach()[(None,) * count] if count else data


def _publish(tensor: Any, pieces: Sequence[_Piece]) -> None:
    """Set the attributes by which torch 2.14 and later recognise a tensor that consists of shards."""
    tensor.global_shape = tuple(tensor.shape)
    tensor.global_offsets = tensor.local_offsets = tuple(box.start for box, _ in pieces)
    tensor.local_sizes = tuple(box.shape for box, _ in pieces)


def _check_same(one: CheckpointableShardedTensor, other: CheckpointableShardedTensor) -> None:
    facts = [(s._sh_ten.key, tuple(s.shape), s.dtype) for s in (one, other)]
    if facts[0] != facts[1]:
        raise SpecError(
            "shards of one container belong to different tensors",
            one._sh_ten.key,
            shape=tuple(one.shape),
            expected=facts[0],
            found=facts[1],
        )


def _write_items(fqn: str, tensor: torch.Tensor, pieces: Sequence[_Piece], first: int | None) -> list[WriteItem]:
    return [
        write_item(fqn, box, tuple(tensor.shape), view.dtype, None if first is None else first + position)
        for position, (box, view) in enumerate(pieces)
    ]


def _found(pieces: Sequence[_Piece], index: MetadataIndex) -> torch.Tensor:
    if index.offset is None:
        raise SpecError("the index of a shard has no offset", index.fqn)
    offset, hint = tuple(index.offset), index.index
    if hint is not None and 0 <= hint < len(pieces) and pieces[hint][0].start == offset:
        return pieces[hint][1]
    for box, view in pieces:
        if box.start == offset:
            return view
    raise SpecError(
        "no local shard is at this offset", index.fqn, offset=offset, expected=[box.start for box, _ in pieces]
    )
