"""What an array holds: counts, moments, a histogram and a slice, with one block of it in memory at a time."""

from collections.abc import Callable, Iterable, Iterator
from math import isfinite, prod, sqrt
from typing import Any

import attrs
import numpy as np

from functional_ckpt.errors import ShapeError
from functional_ckpt.plan.layout import ChunkGrid, subdivide
from functional_ckpt.run.checkpoint import StoredArray
from functional_ckpt.store.encoding import Array, is_raw

__all__ = ["corner", "histogram", "moments", "parse_index", "picked"]

Facts = dict[str, Any]
Index = tuple[Any, ...]
OnBytes = Callable[[int], object]

# The corner of the data that `show KEY` prints: first rows and columns, index 0 along all other axes.
_CORNER_ROWS, _CORNER_COLUMNS = 4, 5
_BLOCK_NBYTES = 64 * 2**20
#: Elements that are made numbers of 8 or 16 bytes at a time.
_STEP_ELEMENTS = 2**20
_BINS = 10
_MOST_ELEMENTS = 10_000


@attrs.frozen
class _Moments:
    """Count, mean and sum of squared distances from the mean, so that those of two parts can be joined."""

    n: int = 0
    mean: complex = 0.0
    squares: float = 0.0

    def joined(self, values: Array) -> "_Moments":
        """Return the moments with more values."""
        m = len(values)
        if not m:
            return self
        mean = complex(values.mean())
        apart = np.abs(values - mean) if np.iscomplexobj(values) else values - mean.real
        shift, n = mean - self.mean, self.n + m
        squares = self.squares + float(np.square(apart).sum()) + abs(shift) ** 2 * (self.n / n) * m
        return _Moments(n, self.mean + shift * (m / n), squares)


def moments(array: StoredArray, each: OnBytes = int) -> Facts:
    """Return how many elements are finite, NaN, infinite and zero, and least, largest, mean and deviation of the first.

    Numbers that overflow, and the order of complex ones, are None. `each` is told the bytes of each block.
    """
    found = _Moments()
    counts = {"nan": 0, "inf": 0, "zeros": 0}
    lows: list[Any] = []
    highs: list[Any] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for values in _steps(array, each):
            finite = values if _is_exact(array) else values[np.isfinite(values)]
            nan = 0 if _is_exact(array) else int(np.isnan(values).sum())
            counts["nan"] += nan
            counts["inf"] += values.size - finite.size - nan
            counts["zeros"] += int((finite == 0).sum())
            if finite.size and not _is_complex(array):
                lows.append(finite.min())
                highs.append(finite.max())
            found = _joined(found, finite)
    number = int if _is_exact(array) else float
    return {
        "finite": found.n, "not_finite": prod(array.shape) - found.n, **counts,
        "min": number(min(lows)) if lows else None, "max": number(max(highs)) if highs else None,
        "mean": _number(found.mean, array) if found.n else None,
        "std": _number(sqrt(found.squares / found.n), None) if found.n and isfinite(found.squares) else None,
    }  # fmt: skip


def _joined(found: _Moments, finite: Array) -> _Moments:
    try:
        return found.joined(finite if np.iscomplexobj(finite) else finite.astype(np.float64))
    except OverflowError:  # of Python's own complex numbers
        return _Moments(found.n + finite.size, complex("nan"), float("nan"))


def histogram(array: StoredArray, least: Any, largest: Any, each: OnBytes = int) -> Facts | None:
    """Return how many of the finite elements lie in each of a few equal intervals; None where nothing is ordered.

    The last interval holds its end, the others do not. Few whole numbers have one interval each.
    """
    if least is None or largest is None:
        return None
    whole = _is_exact(array) and largest - least < _BINS
    bins = largest - least + 1 if whole else _BINS if largest > least else 1
    low, high = (float(least), float(least) + bins) if whole else (float(least), float(largest))
    counts = np.zeros(bins, np.int64)
    for values in _steps(array, each):
        if whole:  # as float64 large ones would not be
            places = (values.astype(np.uint8) if values.dtype.kind == "b" else values) - least
        else:
            finite = values if _is_exact(array) else values[np.isfinite(values)]
            places = _bins_of(finite.astype(np.float64), low, high, bins)
        counts += np.bincount(places.astype(np.int64), minlength=bins)
    edges = [low * (1 - i / bins) + high * (i / bins) for i in range(bins + 1)]
    return {"edges": [least + i for i in range(bins)] if whole else edges, "counts": counts.tolist(), "whole": whole}


def _bins_of(values: Array, low: float, high: float, bins: int) -> Array:
    width = high / 2 - low / 2  # halves: the difference of two large numbers may be none
    if bins == 1 or not width:
        return np.zeros(values.size, np.int64)
    with np.errstate(over="ignore"):
        place = (values / 2 - low / 2) / width * bins
    return np.clip(place, 0, bins - 1).astype(np.int64)


def corner(array: StoredArray) -> list[list[str]]:
    """Return the first rows and columns of the last two axes as text."""
    if not prod(array.shape):
        return []
    ends = (slice(_CORNER_ROWS), slice(_CORNER_COLUMNS))[2 - min(2, len(array.shape)) :]
    values = np.asarray(array[(*(0,) * (len(array.shape) - 2), *ends, ...)])
    return _rows(values)


def parse_index(text: str) -> Index:
    """Return the index that a text such as ``0, :10, -1`` means, as numpy understands it.

    Raises
    ------
    ValueError
        For anything but whole numbers, slices and ``...``.

    Examples
    --------
    >>> parse_index("0, 2:8:2, ...")
    (0, slice(2, 8, 2), Ellipsis)
    """
    return tuple(_item(part.strip()) for part in text.strip().strip("[]").split(","))


def _item(text: str) -> Any:
    if text == "...":
        return Ellipsis
    if ":" not in text:
        return int(text)
    bounds = [int(part) if part.strip() else None for part in text.split(":")]
    if len(bounds) > 3 or bounds[2:] == [0]:
        raise ValueError(f"{text!r} is no slice")
    return slice(*bounds)


def picked(array: StoredArray, index: Index) -> Facts:
    """Return the elements at a basic index.

    Raises
    ------
    IndexError
        If the index does not fit the shape.
    ShapeError
        If it picks more elements than anybody reads, or would have to be read from too large a region.
    """
    shape = np.broadcast_to(np.int8(0), array.shape)[index].shape  # takes no memory
    dense = tuple(_without_step(item) for item in index)
    region = np.broadcast_to(np.int8(0), array.shape)[dense].size * array.entry.spec.itemsize
    if prod(shape) > _MOST_ELEMENTS or region > _BLOCK_NBYTES:
        raise ShapeError(
            "the slice is too large to be shown",
            array.key,
            shape=array.shape,
            expected=f"at most {_MOST_ELEMENTS} elements from a region of {_BLOCK_NBYTES} bytes",
            found=f"{prod(shape)} elements from {region} bytes",
            remedy="Take a smaller one, or index the array of functional_ckpt.open_checkpoint(path)",
        )
    values = np.asarray(array[index]).reshape(shape)
    return {"shape": list(shape), "values": _nested(values), "rows": _texts(values)}


def _without_step(item: Any) -> Any:
    """Return the index of all that lies between the first and the last element of a slice."""
    if not isinstance(item, slice) or item.step in (None, 1):
        return item
    if item.step > 0:
        return slice(item.start, item.stop)
    last = None if item.start is None or item.start == -1 else item.start + 1
    return slice(None if item.stop is None else item.stop + 1, last)


def _nested(values: Array) -> Any:
    """Return nested lists of JSON numbers; text for what is none, two numbers for a complex one."""
    if values.ndim:
        return [_nested(np.asarray(inner)) for inner in values]
    if values.dtype.kind in "biu":
        return int(values)
    number = complex(values) if np.iscomplexobj(values) else float(values)
    parts = [x if isfinite(x) else str(x) for x in (number.real, number.imag)]
    return parts if isinstance(number, complex) else parts[0]


def _texts(values: Array) -> list[tuple[str, list[list[str]]]]:
    """Return the last two axes as rows of text for each index of the axes before them."""
    outer = values.shape[:-2]
    return [
        (f"[{', '.join(map(str, at))}, :, :]" if outer else "", _rows(np.asarray(values[at])))
        for at in np.ndindex(outer)
        if values.size
    ]


def _rows(values: Array) -> list[list[str]]:
    return [[_text(x) for x in row] for row in values.reshape((1,) * (2 - values.ndim) + values.shape)]


def _text(value: Any) -> str:
    if isinstance(value, np.bool_ | np.integer) or np.asarray(value).dtype.kind in "biu":
        return str(value)
    return f"{complex(value):.6g}" if np.iscomplexobj(value) else f"{float(value):.6g}"


def _steps(array: StoredArray, each: OnBytes) -> Iterator[Array]:
    """Yield all elements, a few at a time: whole numbers as they are, others as float64 or complex128."""
    kind = None if _is_exact(array) else np.complex128 if _is_complex(array) else np.float64
    for block in _blocks(array):
        each(block.nbytes)
        flat = block.reshape(-1)
        for start in range(0, flat.size, _STEP_ELEMENTS):
            values = flat[start : start + _STEP_ELEMENTS]
            yield values if kind is None else values.astype(kind)  # there is no arithmetic in float8


def _blocks(array: StoredArray) -> Iterable[Array]:
    """Yield the array in blocks: chunks, or parts of plain ones that are larger than a block."""
    entry = array.entry
    chunk = entry.layout.chunk
    if is_raw(entry.layout):
        chunk = subdivide(chunk, (False,) * len(chunk), entry.spec.itemsize, _BLOCK_NBYTES, 0)
    for index in entry.grid.touched(entry.spec.box):
        box = entry.grid.box(index)
        for part in ChunkGrid(box.shape, chunk).touched(box.relative_to(box)):
            inner = ChunkGrid(box.shape, chunk).box(part)
            bounds = zip(box.start, inner.start, inner.stop, strict=True)
            yield np.asarray(array[(*(slice(at + lo, at + hi) for at, lo, hi in bounds), ...)])


def _is_exact(array: StoredArray) -> bool:
    return array.dtype.startswith(("bool", "int", "uint"))


def _is_complex(array: StoredArray) -> bool:
    return array.dtype.startswith("complex")


def _number(value: complex, array: StoredArray | None) -> Any:
    """Return a number as JSON: None where it overflowed, two numbers where it is complex."""
    if not np.isfinite(value):
        return None
    if array is not None and _is_complex(array):
        return [value.real, value.imag]
    return value.real
