"""`Columns`: a table of integers, stored by column. A value like a tuple of rows, without a Python object per row."""

from collections.abc import Sequence
from typing import Any, Self

import attrs
import numpy as np
from numpy.typing import NDArray

__all__ = ["Columns", "Ints", "mix", "ravelled", "row_keys", "runs", "spread", "to_column", "unravelled"]

Ints = NDArray[np.int64]

_MIX_1, _MIX_2, _MIX_3 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def to_column(values: Any) -> Ints:
    """Return numbers as a read-only int64 array; the converter of every field of `Columns`."""
    view = np.asarray(values, np.int64).view()
    view.flags.writeable = False
    return view


@attrs.frozen(eq=False)
class Columns:
    """Base of tables. Every field is converted by `to_column`, all have one length; tables compare and hash by content.

    Examples
    --------
    >>> @attrs.frozen(eq=False)
    ... class Points(Columns):
    ...     x: Ints = attrs.field(converter=to_column)
    >>> points = Points([3, 4, 5])
    >>> len(points), points.take([2, 0]) == Points([5, 3])
    (3, True)
    """

    @property
    def _columns(self) -> tuple[Ints, ...]:
        return tuple(getattr(self, field.name) for field in attrs.fields(type(self)))

    def __len__(self) -> int:
        return len(self._columns[0])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns) or type(self) is not type(other):
            return NotImplemented
        return all(map(np.array_equal, self._columns, other._columns))

    def __hash__(self) -> int:
        return hash(self.column_bytes())

    def column_bytes(self) -> tuple[bytes, ...]:
        """Return the memory of each column, in the order of the fields."""
        return tuple(column.tobytes() for column in self._columns)

    def take(self, rows: Any) -> Self:
        """Return the rows that `rows` selects: a mask, or row numbers."""
        return type(self)(*(column[rows] for column in self._columns))

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """Return the rows of all `tables`, at least one table."""
        return cls(*map(np.concatenate, zip(*(table._columns for table in tables), strict=True)))


def ravelled(index: Ints, shape: Ints) -> Ints:
    """Return the row-major number of each row of `index` in the matching row of `shape`.

    Examples
    --------
    >>> ravelled(np.array([[1, 2]]), np.array([[4, 3]]))
    array([5])
    """
    flat = np.zeros(len(index), np.int64)
    for axis in range(index.shape[1]):
        flat = flat * shape[:, axis] + index[:, axis]
    return flat


def unravelled(flat: Ints, shape: Ints) -> Ints:
    """Return the index of each row-major number in the matching row of `shape`; the inverse of `ravelled`.

    Examples
    --------
    >>> unravelled(np.array([5]), np.array([[4, 3]]))
    array([[1, 2]])
    """
    index = np.zeros_like(shape)
    for axis in range(shape.shape[1] - 1, -1, -1):
        flat, index[:, axis] = np.divmod(flat, shape[:, axis])
    return index


def runs(*columns: Ints) -> tuple[Ints, Ints]:
    """Return where runs of equal rows begin, and how long they are.

    Examples
    --------
    >>> runs(np.array([7, 7, 7, 8]), np.array([0, 0, 1, 1]))
    (array([0, 2, 3]), array([2, 1, 1]))
    """
    is_first = np.ones(len(columns[0]), bool)
    is_first[1:] = np.any([np.diff(column) != 0 for column in columns], axis=0)
    begin = np.flatnonzero(is_first)
    return begin, np.diff(np.append(begin, len(is_first)))


def row_keys(*columns: Ints) -> list[bytes]:
    """Return the rows of columns and tables side by side as bytes, which are equal if the rows are.

    Examples
    --------
    >>> one, other, again = row_keys(np.array([7, 7, 7]), np.array([[0, 1], [0, 2], [0, 1]]))
    >>> one == again, one == other
    (True, False)
    """
    table = np.column_stack(columns)
    keys: list[bytes] = table.view(np.dtype((np.void, table.itemsize * table.shape[1]))).ravel().tolist()
    return keys


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """Return each row's number as often as `counts` says, and beside it 0, 1, 2, ... within the row.

    Examples
    --------
    >>> spread(np.array([2, 0, 1]))
    (array([0, 0, 2]), array([0, 1, 0]))
    """
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)


def mix(*words: Ints) -> NDArray[np.uint64]:
    """Return a hash of the words of each row: the same on every machine and in every process (splitmix64's steps).

    Examples
    --------
    >>> int(mix(np.array([7]), np.array([1]))[0]) % 5
    0
    """
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            state = (state ^ np.asarray(word).astype(np.uint64)) + _MIX_1
            state = (state ^ (state >> np.uint64(30))) * _MIX_2
            state = (state ^ (state >> np.uint64(27))) * _MIX_3
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)
