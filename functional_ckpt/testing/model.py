"""The model: an array is a numpy array, sharding it is slicing, saving is copying, loading is slicing again.

Values are the positions of cells, if the data type can hold them, so that a misplaced cell is noticed.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from functional_ckpt.spec.array import BITS, ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import ShardSpec, World

__all__ = ["bits", "counts", "deal", "edges", "numpy_dtype", "positions", "view"]

Array = NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy data type of a Zarr v3 name (from ml_dtypes if numpy has none).

    Examples
    --------
    >>> numpy_dtype("bfloat16").itemsize, numpy_dtype("complex64")
    (2, dtype('complex64'))
    """
    return np.dtype(getattr(ml_dtypes, name) if name in BITS else name)


def positions(spec: ArraySpec) -> Array:
    """Return an array of `spec` whose bits number its cells, row-major, modulo what the data type can hold.

    Examples
    --------
    >>> positions(ArraySpec("w", (2, 3), "int16"))
    array([[0, 1, 2],
           [3, 4, 5]], dtype=int16)
    """
    number = np.arange(prod(spec.shape), dtype=np.uint64)
    flat: Array
    if spec.dtype == "bool":
        # An irregular pattern: alternating bits would hide a shift by two.
        flat = ((number * 2654435761) >> np.uint64(7)).astype(np.uint8) % 2 == 1
    elif spec.itemsize == 16:
        flat = np.stack([number, number], axis=1).reshape(-1).view(numpy_dtype(spec.dtype))
    else:
        # In small types numbers wrap around; an odd step makes rows of 256 elements differ.
        step = 1 if spec.itemsize > 1 else 167
        flat = (number * step + number // 256).astype(f"uint{8 * spec.itemsize}").view(numpy_dtype(spec.dtype))
    return flat.reshape(spec.shape)


def view(shard: ShardSpec, array: Array) -> Array:
    """Return the content of the buffer of `shard` if the whole array is `array`; flat shards are 1-d.

    Examples
    --------
    >>> view(ShardSpec(ArraySpec("w", (2, 3), "int8"), Box((0, 1), (2, 3)), 0, (1, 3)), np.arange(6).reshape(2, 3))
    array([2, 4])
    """
    index: tuple[Any, ...] = (*shard.box.slices, ...)
    part: Array = array[index]  # with the ellipsis the result is an array even if zero-dimensional
    return part if shard.flat is None else part.reshape(-1)[slice(*shard.flat)]


def deal(world: World, arrays: Mapping[str, Array]) -> tuple[tuple[Array, ...], ...]:
    """Return the buffers of all ranks: separate C-order copies, ``[rank][position]`` as in `world`.

    Examples
    --------
    >>> w = ArraySpec("w", (2, 3), "int8")
    >>> deal(World(((), (ShardSpec(w, Box((1, 0), (2, 3))),))), {"w": np.arange(6).reshape(2, 3)})
    ((), (array([[3, 4, 5]]),))
    """
    return tuple(tuple(view(s, arrays[s.key]).copy(order="C") for s in shards) for shards in world.ranks)


def counts(shape: Sequence[int], boxes: Iterable[Box]) -> NDArray[np.int64]:
    """Return how many of `boxes` hold each cell.

    Examples
    --------
    >>> counts((4,), [Box((0,), (3,)), Box((2,), (4,))])
    array([1, 1, 2, 1])
    """
    found = np.zeros(tuple(shape), np.int64)
    for box in boxes:
        found[box.slices] += 1
    return found


def edges(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[tuple[int, ...], ...]:
    """Return the coordinates along each axis at which a box, or the array, begins or ends.

    Between two edges all cells are in the same boxes, so that laws about huge arrays can count blocks of cells.

    Examples
    --------
    >>> edges((100,), [Box((20,), (50,))])
    ((0, 20, 50, 100),)
    """
    found = [{0, n} for n in shape]
    for box in boxes:
        for axis, places in enumerate(found):
            places |= {box.start[axis], box.stop[axis]}
    return tuple(tuple(sorted(places)) for places in found)


def bits(array: Array) -> bytes:
    """Return the bytes of an array in C order, for bitwise comparison (NaN payloads, -0.0).

    Examples
    --------
    >>> bits(np.array([-0.0])) == bits(np.array([0.0]))
    False
    """
    return np.ascontiguousarray(array).tobytes()
