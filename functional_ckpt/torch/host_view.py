"""`host_view` and `to_torch`: one memory as a CPU tensor and as a numpy array; torch's data types by their names."""

import torch

from functional_ckpt.errors import DTypeError
from functional_ckpt.spec.array import BITS, DTYPES
from functional_ckpt.store.encoding import Array, numpy_dtype

__all__ = ["DTYPE_NAMES", "TORCH_DTYPES", "dtype_name_of", "host_view", "to_torch"]

#: torch data type -> Zarr v3 name. complex32, quantized and packed float4 have none (docs/adr).
DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name_of(key: str, leaf: torch.Tensor) -> str:
    """Return the name of a tensor's data type.

    Raises
    ------
    DTypeError
        If the format has no such data type.

    Examples
    --------
    >>> dtype_name_of("w", torch.ones(2, dtype=torch.bfloat16))
    'bfloat16'
    """
    name = DTYPE_NAMES.get(leaf.dtype)
    if name is None:
        raise DTypeError(
            "the format has no such data type",
            key,
            shape=tuple(leaf.shape),
            expected="one of " + ", ".join(TORCH_DTYPES),
            found=str(leaf.dtype),
            remedy="View it as a data type of the same width, such as torch.view_as_real for complex32",
        )
    return name


def host_view(tensor: torch.Tensor, name: str) -> Array:
    """Return the memory of a CPU tensor of data type `name` as a numpy array, of any strides.

    Its type is one of ml_dtypes if numpy has none.

    Examples
    --------
    >>> host_view(torch.ones(2, dtype=torch.bfloat16), "bfloat16").dtype
    dtype(bfloat16)
    """
    if name in BITS:
        words: Array = tensor.detach().view(getattr(torch, BITS[name])).numpy()
        return words.view(numpy_dtype(name))
    plain: Array = tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()
    return plain


def to_torch(array: Array, name: str) -> torch.Tensor:
    """Return a writable numpy array of data type `name` as a tensor on the same memory.

    Examples
    --------
    >>> import numpy as np
    >>> to_torch(np.zeros(2, "f4"), "float32").dtype
    torch.float32
    """
    if name in BITS:
        return torch.from_numpy(array.view(BITS[name])).view(TORCH_DTYPES[name])
    return torch.from_numpy(array)
