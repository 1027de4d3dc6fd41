"""`LayoutPolicy`, and the chunk grid of one array. `functional_ckpt.plan.ladder` chooses it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from operator import le
from typing import Any, Literal, TypeAlias, get_args

import attrs

from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.field import as_int, as_tuple, at_least, one_of, refuse
from functional_ckpt.spec.array import DTYPES, ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.tree import has_prefix

__all__ = [
    "ArrayPlan",
    "ChunkGrid",
    "Layout",
    "LayoutPolicy",
    "check_codecs",
    "grid_of",
    "subdivide",
]

ExtendedDTypes: TypeAlias = Literal["native", "bits"]

MIB = 2**20
#: No array needs more, and TensorStore recurses into a long chain.
MAX_CODECS = 8
#: Codec -> lowest and highest level; crc32c has no level.
_CODECS = {"crc32c": (0, -1), "zstd": (-131072, 22), "gzip": (0, 9), "blosc": (0, 9)}
_CODEC = re.compile(r"(?P<name>[a-z0-9]+)(:(?P<level>-?[0-9]{1,6}))?")


def check_codecs(codecs: Sequence[str]) -> None:
    """Raise `PolicyError` if a codec is unknown, or if there are too many for one array.

    Examples
    --------
    >>> check_codecs(("zstd:5", "crc32c"))
    """
    if len(codecs) > MAX_CODECS:
        raise PolicyError("an array has too many codecs", found=len(codecs), expected=f"at most {MAX_CODECS}")
    for codec in codecs:
        check_codec(codec)


def check_codec(codec: str) -> None:
    """Raise `PolicyError` unless `codec` is ``crc32c``, ``zstd[:level]``, ``gzip[:level]`` or ``blosc[:level]``.

    Examples
    --------
    >>> check_codec("zstd:5")
    """
    match = _CODEC.fullmatch(codec)
    name, level = match.group("name", "level") if match else ("", None)
    low, high = _CODECS.get(name, (0, -1))
    if name not in _CODECS or (level is not None and not low <= int(level) <= high):
        raise PolicyError(
            "a codec is unknown", found=codec, expected="crc32c, zstd[:level], gzip[:level] or blosc[:level]"
        )


def _codec_table(table: Mapping[str, str | Iterable[str]] | Iterable[tuple[str, str | Iterable[str]]]) -> Any:
    pairs = as_tuple(table.items() if isinstance(table, Mapping) else table)
    return tuple(map(_codec_row, pairs)) if isinstance(pairs, tuple) else table


def _codec_row(pair: Any) -> Any:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return pair
    prefix, names = pair
    return prefix, (names,) if isinstance(names, str) else as_tuple(names)


def _is_codec_row(row: Any) -> bool:
    return (
        isinstance(row, tuple)
        and len(row) == 2
        and isinstance(row[0], str)
        and isinstance(row[1], tuple)
        and all(isinstance(name, str) for name in row[1])
    )


def _check_codec_table(policy: Any, field: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not all(map(_is_codec_row, value)):
        remedy = "Pass {'': 'zstd'} for all keys"
        raise refuse(policy, field.name, "{key prefix: a codec or several}", value, remedy)
    for _, names in value:
        check_codecs(names)


@attrs.frozen(kw_only=True)
class LayoutPolicy:
    """How arrays are cut into chunks and encoded; sizes in bytes of one uncompressed chunk.

    A chunk with one writer has at least `min_chunk_nbytes`, unless the whole array has less. If such chunks (and one
    file of metadata for each array) are more than `few_files` files, and more than two for each `target_chunk_nbytes`
    of the checkpoint and two for each array, neighbouring ones are joined until they are not; ranks then exchange data.

    `codecs` maps key prefixes (which end at dots) to codec names; the longest matching prefix wins, ``""`` matches all.
    A save refuses a prefix that matches no key of any rank.
    `extended_dtypes` is ``"native"`` (bfloat16 and float8 under their Zarr names) or ``"bits"`` (as unsigned
    integers with an attribute, for tools that do not know those names).

    Raises
    ------
    PolicyError
        For a field of a wrong type, a size below 1 (`min_chunk_nbytes` and `few_files`: below 0), an unknown codec or
        representation.

    Examples
    --------
    >>> LayoutPolicy(codecs={"optim": "zstd:3"}).codecs_of("optim.step")
    ('zstd:3',)
    """

    target_chunk_nbytes: int = attrs.field(default=32 * MIB, converter=as_int, validator=at_least(1))
    min_chunk_nbytes: int = attrs.field(default=MIB, converter=as_int, validator=at_least(0))
    shared_chunk_nbytes: int = attrs.field(default=2 * MIB, converter=as_int, validator=at_least(1))
    few_files: int = attrs.field(default=4096, converter=as_int, validator=at_least(0))
    codecs: tuple[tuple[str, tuple[str, ...]], ...] = attrs.field(
        default=(), converter=_codec_table, validator=_check_codec_table
    )
    extended_dtypes: ExtendedDTypes = attrs.field(default="native", validator=one_of(*get_args(ExtendedDTypes)))

    def codecs_of(self, key: str) -> tuple[str, ...]:
        """Return the codecs for `key`: those of its longest matching prefix."""
        found = [(len(prefix.rstrip(".")), names) for prefix, names in self.codecs if has_prefix(key, prefix)]
        return max(found, default=(0, ()))[1]


@attrs.frozen
class ChunkGrid:
    """A regular grid over an array: `shape` and `chunk` in elements, every chunk extent at least 1.

    Examples
    --------
    >>> grid = ChunkGrid((5, 4), (2, 4))
    >>> grid.counts, grid.box((2, 0))
    ((3, 1), Box(start=(4, 0), stop=(5, 4)))
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @cached_property
    def is_single(self) -> bool:
        """Whether one chunk holds the whole array, and the array has cells."""
        return all(map(le, self.shape, self.chunk)) and 0 not in self.shape

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Chunks per axis (0 along an empty axis)."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @cached_property
    def size(self) -> int:
        """Number of chunks (1 for a zero-dimensional array)."""
        return prod(self.counts)

    def box(self, index: Sequence[int]) -> Box:
        """Return the cells of chunk `index`, clipped to the array."""
        start = tuple(i * c for i, c in zip(index, self.chunk, strict=True))
        stop = tuple(min(s + c, n) for s, c, n in zip(start, self.chunk, self.shape, strict=True))
        return Box(start, stop)

    def touched(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Yield the indices of the chunks that share a cell with `box`, row-major.

        Examples
        --------
        >>> list(ChunkGrid((5,), (2,)).touched(Box((1,), (3,))))
        [(0,), (1,)]
        """
        if box.size and self.is_single:  # most arrays, and worth a shortcut
            yield (0,) * len(self.shape)
        elif box.size:
            spans = zip(box.start, box.stop, self.chunk, strict=True)
            yield from product(*(range(lo // c, -(-hi // c)) for lo, hi, c in spans))

    def position(self, index: Sequence[int]) -> int:
        """Return the row-major number of chunk `index`."""
        flat = 0
        for i, n in zip(index, self.counts, strict=True):
            flat = flat * n + i
        return flat

    def index(self, position: int) -> tuple[int, ...]:
        """Return the index of chunk number `position`; the inverse of `position`.

        Examples
        --------
        >>> grid = ChunkGrid((5, 4), (2, 2))
        >>> grid.index(3), grid.position((1, 1))
        ((1, 1), 3)
        """
        if not position:
            return (0,) * len(self.shape)
        index: list[int] = []
        for n in reversed(self.counts):
            position, i = divmod(position, n)
            index.append(i)
        return tuple(reversed(index))


# Thousands of arrays have the same grid.
grid_of = lru_cache(maxsize=1024)(ChunkGrid)


@attrs.frozen(cache_hash=True)
class Layout:
    """How one array is stored: `ownership` and shape of its chunks, `codecs`, and the `stored` data type.

    Examples
    --------
    >>> Layout("exclusive", (4,), (), "float32").chunk_nbytes
    16
    """

    ownership: str
    chunk: tuple[int, ...]
    codecs: tuple[str, ...]
    stored: str

    @cached_property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk, before any codec."""
        return prod(self.chunk) * DTYPES[self.stored][0]


@attrs.frozen
class ArrayPlan:
    """One array of the checkpoint and its layout.

    Examples
    --------
    >>> ArrayPlan(ArraySpec("w", (5,), "float32"), Layout("exclusive", (4,), (), "float32")).grid.counts
    (2,)
    """

    spec: ArraySpec
    layout: Layout

    @cached_property
    def grid(self) -> ChunkGrid:
        """The chunk grid."""
        return grid_of(self.spec.shape, self.layout.chunk)


def subdivide(
    chunk: Sequence[int], faced: Sequence[bool], itemsize: int, target_nbytes: int, min_nbytes: int
) -> tuple[int, ...]:
    """Split `chunk` toward `target_nbytes`, leading axes first, so that chunks stay contiguous in memory.

    An axis without interior faces is cut evenly (a ragged last chunk is harmless there); one with faces by a
    divisor. If the next divisor gives less than `min_nbytes`, the larger one is kept.

    Examples
    --------
    >>> subdivide((100, 8), (False, False), 1, 320, 1), subdivide((7, 8), (True, True), 1, 16, 16)
    ((34, 8), (7, 8))
    """
    split = list(chunk)
    for axis, extent in enumerate(chunk):
        rest = prod(split) // extent * itemsize
        if extent * rest <= target_nbytes:
            break
        allowed = max(1, target_nbytes // rest)
        if extent == 1 or not faced[axis]:
            split[axis] = -(-extent // -(-extent // allowed))
            continue
        below = _largest_divisor(extent, allowed)
        if below * rest < min_nbytes:
            split[axis] = _smallest_divisor(extent, allowed)
            break
        split[axis] = below
    return tuple(split)


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def _largest_divisor(n: int, at_most: int) -> int:
    return max(d for d in _divisors(n) if d <= at_most)


def _smallest_divisor(n: int, above: int) -> int:
    return min(d for d in _divisors(n) if d > above)
