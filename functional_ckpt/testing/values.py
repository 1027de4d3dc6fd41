"""Strategies for array contents, sharded arrays and state trees."""

from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from numpy.typing import NDArray

from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.shard import World
from functional_ckpt.testing.model import deal, numpy_dtype, positions
from functional_ckpt.testing.shardings import array_specs, shardings

__all__ = ["arrays", "plain_values", "sharded_arrays", "special_words", "state_trees", "text_keys"]

Array = NDArray[Any]

#: Exponent bits, all ones: infinity when the mantissa is zero, else a NaN. Complex numbers are two floats.
_EXPONENTS = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F800000,
    "float64": 0x7FF << 52,
    "complex64": 0x7F800000,
    "complex128": 0x7FF << 52,
}


def special_words(dtype: str) -> Array:
    """Return values that inexact code would change, as unsigned words: -0.0, subnormals, infinities, NaN payloads.

    A word is an element, or half of a complex element.

    Examples
    --------
    >>> [hex(word) for word in special_words("bfloat16")]
    ['0x0', '0x8000', '0x1', '0x7fff', '0xffff', '0x7f80', '0xff80', '0x7fc0', '0x7f81', '0xff81']
    """
    if dtype == "bool":
        return np.array([0, 1], np.uint8)
    kind = numpy_dtype(dtype)
    nbytes = kind.itemsize // 2 if kind.kind == "c" else kind.itemsize
    sign, ones = 1 << (8 * nbytes - 1), (1 << 8 * nbytes) - 1
    words = [0, sign, 1, ones ^ sign, ones]
    if dtype in _EXPONENTS:
        inf = _EXPONENTS[dtype]
        quiet = (inf & -inf) >> 1
        words += [inf, inf | sign, inf | quiet, inf | 1, inf | sign | 1]
    return np.array(words, f"uint{8 * nbytes}")


@st.composite
def arrays(draw: DrawFn, spec: ArraySpec) -> Array:
    """Generate numpy arrays of `spec`: cell numbers, special values, or any bits at all.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(arrays(ArraySpec("w", (3,), "int8")), lambda x: True)
    array([  0, -89,  78], dtype=int8)
    """
    kind = draw(st.sampled_from(["positions", "specials", "bits"]))
    if kind == "positions":
        return positions(spec)
    words = special_words(spec.dtype)
    count = prod(spec.shape) * spec.itemsize // words.itemsize
    if kind == "specials":
        flat = np.resize(np.roll(words, -draw(st.integers(0, words.size - 1))), count)
    else:
        # One seed instead of every bit: the structure should shrink, the contents need only be arbitrary.
        random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        top = 1 if spec.dtype == "bool" else np.iinfo(words.dtype).max
        flat = random.integers(0, top, count, words.dtype, endpoint=True)
    return flat.view(numpy_dtype(spec.dtype)).reshape(spec.shape)


@st.composite
def sharded_arrays(draw: DrawFn, key: str | None = None) -> tuple[Array, World, tuple[tuple[Array, ...], ...]]:
    """Generate an array, a valid world that holds it, and the buffers of all ranks (``[rank][position]``).

    Examples
    --------
    >>> from hypothesis import find
    >>> x, world, buffers = find(sharded_arrays(), lambda case: case[0].size == 2 and case[1].size == 2)
    >>> sum(buffer.size for rank in buffers for buffer in rank)
    2
    """
    spec = draw(array_specs(key))
    world = draw(shardings(spec))
    array = draw(arrays(spec))
    return array, world, deal(world, {spec.key: array})


def plain_values() -> SearchStrategy[Any]:
    """Generate the plain Python values that state dicts hold, tuples of them included; NaN is not among them.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(plain_values(), lambda value: isinstance(value, tuple) and len(value) > 1)
    (None, None)
    """
    numbers = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
    single = st.none() | st.booleans() | numbers | st.text(max_size=5) | st.binary(max_size=5)
    return st.recursive(single, lambda values: st.lists(values, max_size=3).map(tuple), max_leaves=4)


def text_keys(wild: bool = False) -> SearchStrategy[str]:
    """Generate dict keys; unless `wild`, without dots and digits, so that no two paths give the same key.

    Examples
    --------
    >>> from hypothesis import find
    >>> len(find(text_keys(), lambda key: True))
    1
    """
    if wild:
        return st.text(max_size=5)
    return st.text("abcxyz_-/ ~é", min_size=1, max_size=4)


def state_trees(leaves: SearchStrategy[Any] | None = None, wild: bool = False) -> SearchStrategy[Any]:
    """Generate state trees: dicts (text and int keys) and lists of leaves, by default plain values and arrays.

    Unless `wild`, the paths of the leaves give different keys. The root is a dict or, if `wild`, any value.

    Examples
    --------
    >>> from hypothesis import find
    >>> tree = find(state_trees(), lambda tree: any(isinstance(value, list) for value in tree.values()))
    >>> list(tree.values())
    [[]]
    """
    if leaves is None:
        leaves = plain_values() | array_specs("w").flatmap(arrays)
    names = text_keys(wild) | st.integers(0, 9)
    tree = st.recursive(
        leaves,
        lambda trees: st.lists(trees, max_size=3) | st.dictionaries(names, trees, max_size=3),
        max_leaves=6,
    )
    return tree if wild else st.dictionaries(text_keys(), tree, max_size=3)
