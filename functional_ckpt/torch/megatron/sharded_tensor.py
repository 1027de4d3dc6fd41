"""`ShardedTensor`: a local tensor and its place in a global one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import index
from typing import Any

import torch

from functional_ckpt.errors import DTypeError, ShapeError, SpecError
from functional_ckpt.spec.array import check_key, known_spec
from functional_ckpt.spec.grid import fragment_shape, grid_index, shard_at
from functional_ckpt.spec.shard import ShardSpec, from_rank_offsets, narrow, narrow_runs
from functional_ckpt.torch.host_view import DTYPE_NAMES
from functional_ckpt.torch.megatron.exceptions import AxisError, NarrowError, asserting
from functional_ckpt.torch.megatron.sharded_base import ReplicaId, ShardedBase, about

__all__ = ["ShardedTensor"]

# For checks of shapes only: they do not depend on the data type, which may be one that the format does not have.
_ANY_DTYPE = "uint8"


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor and its place in a global one. The fields may be changed; `spec` returns them as a value.

    Parameters
    ----------
    key
        Name of the global tensor, unique in the checkpoint.
    data
        The local tensor; None if only its place is needed.
    dtype
        Its data type.
    local_shape
        Shape of the local shard in elements, before flattening, without prepended axes.
    global_shape
        Shape of the global tensor in elements.
    global_offset
        Where the local shard begins in the global tensor, in elements.
    axis_fragmentations
        Number of equal shards along each global axis, or None if the shards do not form a regular grid.
    replica_id
        0 or all zeros on the one rank that holds the main copy of the shard, something else on the others.
    prepend_axis_num
        Leading global axes that the local tensor lacks; the shard has extent 1 along them.
    allow_shape_mismatch
        The stored tensor may have another shape: the common part is loaded, the rest is set to zero.
    flattened_range
        `data` is this range of the elements of the flattened shard, as a tensor of one dimension.

    Raises
    ------
    CheckpointingException
        If the fields contradict each other, or the shard leaves the global tensor; names the key.

    Examples
    --------
    >>> shard = ShardedTensor("w", torch.ones(2, 4), torch.float32, (2, 4), (6, 4), (2, 0), (3, 1))
    >>> shard.spec.box
    Box(start=(2, 0), stop=(4, 4))
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    @property
    def spec(self) -> ShardSpec:
        """The part that this rank holds, as a value; `grid` is None if `axis_fragmentations` does not describe it.

        Raises
        ------
        CheckpointingException
            As the constructor; also for a data type that the format does not have.
        """
        if self.dtype not in DTYPE_NAMES:
            what, expected = "the format has no such data type", "one of " + ", ".join(DTYPE_NAMES.values())
            shape = tuple(self.global_shape)
            raise DTypeError(what, self.key, shape=shape, expected=expected, found=str(self.dtype))
        return self._shard()

    def validate_metadata_integrity(self) -> None:
        """Repeat the checks of the constructor, after fields were changed.

        Raises
        ------
        CheckpointingException
            If the fields contradict each other, or the shard leaves the global tensor; names the key.
        """
        with about(self.key):
            shard = self._shard()
            if self.axis_fragmentations is not None:
                fragment_shape(shard.array, self.axis_fragmentations, exact=False)
                grid_index(shard)
            if self.data is not None:
                self._check_data(self.data, self._data_shape(shard))

    @property
    def has_regular_grid(self) -> bool:
        """Whether the shards of the global tensor form a regular grid; false for ranges of flattened shards."""
        return self.axis_fragmentations is not None and self.flattened_range is None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index into the global tensor that gives the (unflattened) local one.

        Examples
        --------
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, 2, 3), prepend_axis_num=1)
        >>> shard.global_slice()
        (2, slice(0, 4, None))
        """
        box = self._shard().box
        prepended = self.prepend_axis_num
        return (*box.start[:prepended], *box.slices[prepended:])

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the index of the local shard in the grid of all shards.

        Raises
        ------
        CheckpointingException
            If the offset is not a multiple of the local shape; an ``AssertionError`` too.

        Examples
        --------
        >>> ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (0, 1, 3)).local_chunk_offset_in_global()
        (1, 0)
        """
        with about(self.key), asserting():
            return grid_index(self._shard())

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the shape, in elements, of one fragment of the global tensor.

        Raises
        ------
        CheckpointingException
            If the grid is irregular, or does not divide the global tensor and `allow_shape_mismatch` is off.

        Examples
        --------
        >>> ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (0, 1, 3)).max_allowed_chunks()
        (2, 4)
        """
        with about(self.key):
            if self.axis_fragmentations is None:
                raise ShapeError(
                    "the fragments of an irregular grid have no common shape", self.key, shape=self.global_shape
                )
            array = self._shard().array
            return fragment_shape(array, self.axis_fragmentations, exact=not self.allow_shape_mismatch)

    def without_data(self) -> "ShardedTensor":
        """Return a copy whose `data` is None.

        Examples
        --------
        >>> ShardedTensor.from_rank_offsets("w", torch.ones(4)).without_data().data is None
        True
        """
        return replace(self, data=None)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> "ShardedTensor":
        """Return the shard of a regular grid.

        Parameters
        ----------
        key, data, replica_id, prepend_axis_num
            See `ShardedTensor`.
        rank_offsets
            ``(axis, index, fragments)``: along global `axis` (prepended axes come first) the tensor is cut into
            `fragments` parts, and `data` is part number `index`. Other axes are not cut.
        flattened_range
            None; see `from_rank_offsets_flat`.
        init_kwargs
            Further fields.

        Raises
        ------
        CheckpointingException
            If an axis is repeated or out of range (then also an ``IndexError``), or not ``0 <= index < fragments``.

        Examples
        --------
        >>> ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (0, 1, 3)).global_offset
        (2, 0)
        """
        with about(key):
            if flattened_range is not None:
                raise SpecError(
                    "flattened_range is not None", key, found=flattened_range, remedy="Use from_rank_offsets_flat"
                )
        fields = _grid_fields(key, tuple(data.shape), rank_offsets, replica_id, prepend_axis_num)
        return cls(data=data, dtype=data.dtype, **fields, **init_kwargs)

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: Sequence[int],
        *rank_offsets: tuple[int, int, int],
        flattened_range: slice | None = None,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        **init_kwargs: Any,
    ) -> "ShardedTensor":
        """Return a range of the flattened shard, of shape `non_flat_local_shape`, of a regular grid.

        Parameters as for `from_rank_offsets`; `data` has one dimension.

        Raises
        ------
        CheckpointingException
            As `from_rank_offsets`; also if the range is missing or leaves the shard, or `data` has another length.

        Examples
        --------
        >>> flat = ShardedTensor.from_rank_offsets_flat(
        ...     "w", torch.ones(5), (2, 4), (0, 1, 3), flattened_range=slice(3, 8))
        >>> flat.global_shape, flat.spec.size
        ((6, 4), 5)
        """
        with about(key):
            if flattened_range is None:
                raise SpecError("from_rank_offsets_flat needs a flattened range", key, remedy="Call from_rank_offsets")
        fields = _grid_fields(key, tuple(non_flat_local_shape), rank_offsets, replica_id, prepend_axis_num)
        return cls(data=data, dtype=data.dtype, flattened_range=flattened_range, **fields, **init_kwargs)

    def init_data(self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Set `data`, if it is None, to ``init_fn(shape, dtype=..., device=...)``.

        Examples
        --------
        >>> shard = ShardedTensor("w", None, torch.int8, (3,), (9,), (6,), (3,))
        >>> shard.init_data("cpu", torch.zeros)
        >>> shard.data
        tensor([0, 0, 0], dtype=torch.int8)
        """
        if self.data is None:
            shape = self._data_shape(self._shard())
            self.data = init_fn(shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list["ShardedTensor"]:
        """Narrow the local tensor along `dim` (prepended axes not counted), as every rank narrows its own.

        The global tensor keeps `length` elements per shard. The data of the result are views. A flat shard gives
        one shard per contiguous run of `data` that survives, maybe none; any other gives one.

        Raises
        ------
        CheckpointingException
            If the range leaves the local tensor (a ``RuntimeError`` too), the axis does not exist (an ``IndexError``),
            or global extent or offset are not multiples of the local extent (an ``AssertionError``).

        Examples
        --------
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.arange(4), (0, 1, 3))
        >>> [half] = shard.narrow(0, 1, 2)
        >>> half.data, half.global_shape, half.global_offset
        (tensor([1, 2]), (6,), (2,))
        """
        with about(self.key), asserting():
            axis = self._axis(dim)
            if not 0 <= start <= start + length <= self.local_shape[axis]:
                what, found = "a narrowed range leaves the shard", (start, length)
                expected = f"within 0 to {self.local_shape[axis]}"
                raise NarrowError(what, self.key, shape=tuple(self.local_shape), expected=expected, found=found)
            shard, global_axis = self._shard(), axis + self.prepend_axis_num
            if shard.flat is not None:
                runs = narrow_runs(shard, global_axis, start, length)
                return [
                    self._narrowed(r.shard, None if self.data is None else self.data[r.start : r.stop]) for r in runs
                ]
            (part,) = narrow(shard, global_axis, start, length)
            return [self._narrowed(part, None if self.data is None else self.data.narrow(axis, start, length))]

    def _axis(self, dim: int) -> int:
        ndim = len(self.local_shape)
        if not -ndim <= dim < ndim:
            what, shape = "a narrowed axis does not exist", tuple(self.local_shape)
            raise AxisError(what, self.key, shape=shape, expected=f"[{-ndim}, {ndim})", found=dim)
        return dim % ndim

    def _narrowed(self, part: ShardSpec, data: torch.Tensor | None) -> "ShardedTensor":
        return replace(
            self,
            data=data,
            local_shape=part.box.shape[self.prepend_axis_num :],
            global_shape=part.array.shape,
            global_offset=part.box.start,
            flattened_range=None if part.flat is None else slice(*part.flat),
        )

    def _shard(self) -> ShardSpec:
        with about(self.key):
            check_key(self.key)
            # As ints: equal numbers of other types must not find what is known of these.
            shape, extents, offset = _ints(self.global_shape), _ints(self.local_shape), _ints(self.global_offset)
            array = known_spec(self.key, shape, DTYPE_NAMES.get(self.dtype, _ANY_DTYPE))
            if not len(shape) == self.prepend_axis_num + len(extents) == len(offset):
                raise ShapeError(
                    "local shape, global shape and offset differ in length",
                    self.key,
                    shape=array.shape,
                    offset=tuple(self.global_offset),
                    expected=f"{len(array.shape)} axes, {self.prepend_axis_num} of them prepended",
                    found=f"a local shape {tuple(self.local_shape)}",
                )
            extents = (1,) * self.prepend_axis_num + extents
            replica = self.replica_id if isinstance(self.replica_id, int) else tuple(self.replica_id)
            counts = None if self.axis_fragmentations is None else _ints(self.axis_fragmentations)
            return shard_at(array, extents, offset, replica, self._flat(extents), counts)

    def _flat(self, extents: tuple[int, ...]) -> tuple[int, int] | None:
        part = self.flattened_range
        if part is None:
            return None
        if part.step not in (None, 1):
            raise ShapeError("a flattened range has a step", self.key, shape=extents, found=part)
        return 0 if part.start is None else index(part.start), prod(extents) if part.stop is None else index(part.stop)

    def _data_shape(self, shard: ShardSpec) -> tuple[int, ...]:
        return tuple(self.local_shape) if shard.flat is None else (shard.size,)

    def _check_data(self, data: torch.Tensor, shape: tuple[int, ...]) -> None:
        if data.dtype != self.dtype:
            raise DTypeError(
                "the local tensor has another data type than its shard",
                self.key,
                shape=tuple(self.local_shape),
                expected=str(self.dtype),
                found=str(data.dtype),
            )
        if tuple(data.shape) != shape:
            raise ShapeError(
                "the local tensor has another shape than its shard",
                self.key,
                shape=tuple(self.global_shape),
                offset=tuple(self.global_offset),
                expected=shape,
                found=tuple(data.shape),
            )


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(index, values))


def _grid_fields(
    key: str,
    local_shape: tuple[int, ...],
    rank_offsets: tuple[tuple[int, int, int], ...],
    replica_id: ReplicaId,
    prepend_axis_num: int,
) -> dict[str, Any]:
    with about(key):
        ndim = prepend_axis_num + len(local_shape)
        if any(axis >= ndim for axis, _, _ in rank_offsets):
            what = "a rank offset names an axis that does not exist"
            raise AxisError(what, key, shape=local_shape, expected=f"[0, {ndim})", found=rank_offsets)
        shard = from_rank_offsets(
            key, _ANY_DTYPE, local_shape, *rank_offsets, replica_id=replica_id, prepend_axes=prepend_axis_num
        )
    return {
        "key": key,
        "local_shape": local_shape,
        "global_shape": shard.array.shape,
        "global_offset": shard.box.start,
        "axis_fragmentations": shard.grid,
        "replica_id": replica_id,
        "prepend_axis_num": prepend_axis_num,
    }
