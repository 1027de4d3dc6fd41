"""bfloat16 and the float8 family as data types of zarr-python.

zarr-python does not know them, and it cannot list a group that has an array of an unknown type.
Importing this module registers those names that are not registered yet; from zarr 3.4.1 on, the
``zarr.data_type`` entry points of functional_ckpt do that without an import.

When zarr-python itself writes, it omits chunks that equal the fill value, and for these types it
takes -0.0 for 0.0: write with ``config={"write_empty_chunks": True}`` if that sign matters.

Examples
--------
>>> import ml_dtypes
>>> import numpy as np
>>> import zarr
>>> import functional_ckpt.store.zarr_dtypes
>>> array = zarr.create_array({}, data=np.array([1, -0.0, np.nan], ml_dtypes.bfloat16))
>>> array.metadata.to_dict()["data_type"]
'bfloat16'
>>> array[:]
array([1, -0, nan], dtype=bfloat16)
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, SupportsFloat, TypeVar, cast

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

try:  # its place in zarr >= 3.4, where importing it from the old place warns
    from zarr.errors import (  # type: ignore[attr-defined, unused-ignore]
        DataTypeValidationError,
    )
except ImportError:
    from zarr.dtype import DataTypeValidationError

if TYPE_CHECKING:
    from zarr.core.common import JSON

__all__ = [
    "BFloat16",
    "Float8E4M3FN",
    "Float8E4M3FNUZ",
    "Float8E5M2",
    "Float8E5M2FNUZ",
    "Float8E8M0FNU",
]

_SPECIAL: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_OTHER_ORDER: Final = "big" if sys.byteorder == "little" else "little"
_Class = TypeVar("_Class", bound=type[Any])


def _registered(cls: _Class) -> _Class:
    """Return the class that zarr uses for this name: `cls`, unless another is registered already.

    So the module attribute, which the entry point loads, is always the registered class, even if
    zarr or another package has registered its own.
    """
    return cast("_Class", data_type_registry.contents.setdefault(cls._zarr_v3_name, cls))


@dataclass(frozen=True, kw_only=True)
class _MlFloat(ZDType[np.dtype[Any], np.generic], HasItemSize):
    """Base of the data types; a subclass names its ml_dtypes scalar and its Zarr v3 name."""

    scalar: ClassVar[type[Any]]
    _writes_numbers: ClassVar[bool] = True

    @property
    def item_size(self) -> int:
        """Bytes per element."""
        return np.dtype(self.scalar).itemsize

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """Return the data type of a NumPy dtype of the same scalar type."""
        if dtype.type is not cls.scalar:
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the NumPy dtype."""
        return np.dtype(self.scalar)

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise DataTypeValidationError(f"Zarr v2 has no {cls._zarr_v3_name}, got {data!r}")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")
        return cls()

    def to_json(self, zarr_format: int) -> str:  # type: ignore[override]
        """Return the Zarr v3 name; Zarr v2 has none and is refused."""
        if zarr_format != 3:
            raise ValueError(f"{self._zarr_v3_name} needs Zarr format 3, not {zarr_format}")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, str | int | float | np.number | np.bool_ | self.scalar)

    def cast_scalar(self, data: object) -> np.generic:
        """Return a number, or one of the JSON forms of a fill value, as a scalar."""
        if not self._check_scalar(data):
            raise TypeError(f"cannot make a {self._zarr_v3_name} of {data!r}")
        if isinstance(data, str):
            return self._from_text(data)
        if isinstance(data, self.scalar):
            return cast("np.generic", data)  # keeps the payload of a NaN
        return self._from_float(float(cast("SupportsFloat", data)))

    def default_scalar(self) -> np.generic:
        """Return the value whose bits are all zero, as TensorStore does."""
        return self._from_bits(0)

    def from_json_scalar(self, data: JSON, *, zarr_format: int) -> np.generic:
        """Read a fill value: a number, "NaN", "Infinity", "-Infinity", or "0x" and the bits."""
        return self.cast_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:
        """Write a fill value so that reading it gives the same bits."""
        value = self.cast_scalar(data)
        number = float(cast("SupportsFloat", value))
        if math.isfinite(number) and self._writes_numbers:
            return number
        for text, special in _SPECIAL.items():
            if value.tobytes() == self._from_float(special).tobytes():
                return text
        bits = int.from_bytes(value.tobytes(), sys.byteorder)
        return f"{bits:#0{2 + 2 * self.item_size}x}"

    def _from_float(self, number: float) -> np.generic:
        return cast("np.generic", self.scalar(number))

    def _from_bits(self, bits: int) -> np.generic:
        raw = bits.to_bytes(self.item_size, sys.byteorder)
        return cast("np.generic", np.frombuffer(raw, self.scalar)[0])

    def _from_text(self, text: str) -> np.generic:
        # Text is never passed to the scalar type itself: ml_dtypes 0.6 crashes on text that it cannot parse.
        if text in _SPECIAL:
            return self._from_float(_SPECIAL[text])
        if text.startswith("0x") and len(text) == 2 + 2 * self.item_size:
            return self._from_bits(int(text, 16))
        raise TypeError(f"{text!r} is not a fill value of {self._zarr_v3_name}")


# HasEndianness is for items of several bytes: without it zarr writes a ``bytes`` codec without
# `endian`, and TensorStore refuses the array.
@_registered
@dataclass(frozen=True, kw_only=True)
class BFloat16(_MlFloat, HasEndianness):
    """bfloat16: the upper half of a float32."""

    _zarr_v3_name = "bfloat16"
    scalar = ml_dtypes.bfloat16

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """Return the data type of a NumPy bfloat16 dtype of either byte order."""
        if dtype.type is not cls.scalar:
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls(endianness=sys.byteorder if dtype.isnative else _OTHER_ORDER)

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the NumPy dtype, in this byte order."""
        native: np.dtype[Any] = np.dtype(self.scalar)
        return native if self.endianness == sys.byteorder else native.newbyteorder("S")


@_registered
class Float8E4M3FN(_MlFloat):
    """float8_e4m3fn: no infinities, one NaN of either sign."""

    _zarr_v3_name = "float8_e4m3fn"
    scalar = ml_dtypes.float8_e4m3fn


@_registered
class Float8E5M2(_MlFloat):
    """float8_e5m2: the upper half of a float16."""

    _zarr_v3_name = "float8_e5m2"
    scalar = ml_dtypes.float8_e5m2


@_registered
class Float8E4M3FNUZ(_MlFloat):
    """float8_e4m3fnuz: one NaN, neither infinities nor a negative zero."""

    _zarr_v3_name = "float8_e4m3fnuz"
    scalar = ml_dtypes.float8_e4m3fnuz


@_registered
class Float8E5M2FNUZ(_MlFloat):
    """float8_e5m2fnuz: one NaN, neither infinities nor a negative zero."""

    _zarr_v3_name = "float8_e5m2fnuz"
    scalar = ml_dtypes.float8_e5m2fnuz


@_registered
class Float8E8M0FNU(_MlFloat):
    """float8_e8m0fnu: powers of two, no sign and no zero.

    TensorStore 0.1.86 reads and writes numeric fill values of this type with another exponent
    bias, and writes all-zero bits (2**-127) as 0.0. So 0 is read as those bits, and fill values
    are written in hexadecimal, which both understand.
    """

    _zarr_v3_name = "float8_e8m0fnu"
    scalar = ml_dtypes.float8_e8m0fnu
    _writes_numbers = False

    def _from_float(self, number: float) -> np.generic:
        return super()._from_float(number) if number else self._from_bits(0)
