"""`ArraySpec`: key, shape and data type of an array; and the data types of the format."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from operator import index
from types import MappingProxyType

import attrs

from functional_ckpt.errors import DTypeError, ShapeError, SpecError
from functional_ckpt.spec.box import MAX_NDIM, Box, known_box

__all__ = ["BITS", "DTYPES", "MAX_EXTENT", "MAX_KNOWN", "ArraySpec", "ObjectSpec", "can_cast", "check_key",
           "known_spec"]  # fmt: skip

#: Zarr v3 data type name -> (item size in bytes, kind). A same_kind cast may go from a kind to a later one:
#: 0 bool, 1 unsigned, 2 signed, 3 floating, 4 complex. A data type outside this table is never passed to
#: TensorStore, which aborts the process on some data types that it does not know.
DTYPES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "bool": (1, 0),
        "uint8": (1, 1),
        "uint16": (2, 1),
        "uint32": (4, 1),
        "uint64": (8, 1),
        "int8": (1, 2),
        "int16": (2, 2),
        "int32": (4, 2),
        "int64": (8, 2),
        "float8_e4m3fn": (1, 3),
        "float8_e4m3fnuz": (1, 3),
        "float8_e5m2": (1, 3),
        "float8_e5m2fnuz": (1, 3),
        "float8_e8m0fnu": (1, 3),
        "bfloat16": (2, 3),
        "float16": (2, 3),
        "float32": (4, 3),
        "float64": (8, 3),
        "complex64": (8, 4),
        "complex128": (16, 4),
    }
)

#: Names outside the core Zarr v3 specification -> unsigned type of the same width, for tools without them.
BITS: Mapping[str, str] = MappingProxyType(
    {name: "uint16" if name == "bfloat16" else "uint8" for name in DTYPES if name.startswith(("float8", "bfloat"))}
)

#: How many specs, leaves, names, shards or headers a process keeps from save to save: about 50 MB of each at most.
MAX_KNOWN = 2**16

#: Largest extent of one axis, in elements (TensorStore's limit, measured).
MAX_EXTENT = 2**61


def can_cast(stored: str, wanted: str, rule: str) -> bool:
    """Tell whether loading may turn `stored` into `wanted` under ``"error" | "same_kind" | "any"``.

    ``same_kind`` allows every change within a kind (float64 to float32 too) and widening to a later kind
    in bool, unsigned, signed, floating, complex; this is numpy's rule of that name.

    Examples
    --------
    >>> can_cast("float32", "bfloat16", "same_kind"), can_cast("float32", "int32", "same_kind")
    (True, False)
    """
    if stored == wanted or rule == "any":
        return True
    return rule == "same_kind" and DTYPES[stored][1] <= DTYPES[wanted][1]


def check_key(key: object) -> None:
    """Raise `SpecError` unless `key` is text that UTF-8 can hold.

    Examples
    --------
    >>> check_key("model.layers.0.weight")
    """
    if isinstance(key, str) and key.isascii():
        return
    if not isinstance(key, str):
        raise SpecError("a key must be text", repr(key), expected="str", found=type(key).__name__)
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise SpecError("a key must be valid Unicode", ascii(key), found=str(error)) from None


def _ints(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(index, shape))


@attrs.frozen
class ArraySpec:
    """A whole array: `key` unique in the checkpoint, `shape` in elements, `dtype` a Zarr v3 name.

    Raises
    ------
    SpecError
        For a key that is not text.
    ShapeError
        For more than 32 dimensions, or an extent that is negative or over 2**61.
    DTypeError
        For a data type that the format does not have.

    Examples
    --------
    >>> ArraySpec("w", (4, 2), "bfloat16").nbytes
    16
    """

    key: str
    shape: tuple[int, ...] = attrs.field(converter=_ints)
    dtype: str

    def __attrs_post_init__(self) -> None:
        check_key(self.key)
        if len(self.shape) > MAX_NDIM:
            raise ShapeError(
                "an array has too many dimensions",
                self.key,
                shape=self.shape,
                expected=f"at most {MAX_NDIM}",
                found=len(self.shape),
                remedy="Merge axes with reshape before saving",
            )
        if self.shape and not 0 <= min(self.shape) <= max(self.shape) <= MAX_EXTENT:
            raise ShapeError("an extent is out of bounds", self.key, shape=self.shape, expected="0 <= n <= 2**61")
        if self.dtype not in DTYPES:
            raise DTypeError(
                "the format has no such data type",
                self.key,
                shape=self.shape,
                expected="one of " + ", ".join(DTYPES),
                found=self.dtype,
                remedy="View the tensor as a data type of the same width",
            )

    def __hash__(self) -> int:
        """Return the hash of the key: few specs share one, and the text has its hash already."""
        return hash(self.key)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype][0]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return prod(self.shape) * self.itemsize

    @property
    def box(self) -> Box:
        """The whole array as a box."""
        return known_box(self.shape)


#: An `ArraySpec`, the same object for the same arguments: checked once, and compared at no cost.
known_spec = lru_cache(maxsize=MAX_KNOWN)(ArraySpec)


@attrs.frozen
class ObjectSpec:
    """A leaf that is not an array: a plain value, or bytes made by an object codec.

    Examples
    --------
    >>> ObjectSpec("optim.param_groups.0.lr").key
    'optim.param_groups.0.lr'
    """

    key: str

    def __attrs_post_init__(self) -> None:
        check_key(self.key)
