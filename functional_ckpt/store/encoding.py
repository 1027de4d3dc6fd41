"""The encoding of keys, data types, metadata and digests in storage (normative text: docs/format.md)."""

import json
import re
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import xxhash
from numpy.typing import NDArray

from functional_ckpt.errors import DTypeError
from functional_ckpt.plan.layout import Layout
from functional_ckpt.spec.array import BITS, DTYPES, MAX_KNOWN, ArraySpec

__all__ = [
    "BEGINNINGS",
    "MANIFEST",
    "METADATA_FILE",
    "METADATA_TEXT",
    "PROVENANCE",
    "ROOT",
    "Array",
    "array_metadata",
    "chunk_name",
    "chunk_path",
    "digest",
    "digest_bytes",
    "dtype_name",
    "has_dtype",
    "is_raw",
    "metadata_path",
    "named_metadata",
    "node_name",
    "numpy_dtype",
]

Array: TypeAlias = NDArray[Any]

#: Longest node name, in bytes; file systems allow 255, and lock and temporary files add a suffix.
MAX_NAME_NBYTES = 200
ROOT, MANIFEST, PROVENANCE, METADATA_FILE = "zarr.json", "manifest.json", "provenance.json", ".metadata"
METADATA_TEXT = (
    b"A checkpoint of functional_ckpt, for programs that look for a file of this name. There is no pickle in it.\n"
)
#: How the files of a checkpoint begin: other programs have files of these names too.
BEGINNINGS = {MANIFEST: b'{"aliases":[', PROVENANCE: b'{"finished":', METADATA_FILE: METADATA_TEXT[:32]}
_RESERVED = (ROOT, f"{ROOT}.new", MANIFEST, PROVENANCE)
_ESCAPES = {
    "~": "~0",
    "/": "~1",
    "\\": "~2",
    ":": "~3",
    "*": "~4",
    "?": "~5",
    '"': "~6",
    "<": "~7",
    ">": "~8",
    "|": "~9",
}
# Most keys match this and need no escaping letter by letter.
_PLAIN_NAME = re.compile(r"(?!__)[a-z0-9_\-][a-z0-9_.\-]{0,199}")
_BYTE = np.dtype(np.uint8)
_NUMPY = {name: np.dtype(getattr(ml_dtypes, name)) if name in BITS else np.dtype(name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy (or ml_dtypes) data type of a Zarr v3 name of the format.

    Examples
    --------
    >>> numpy_dtype("float32"), numpy_dtype("bfloat16").itemsize
    (dtype('float32'), 2)
    """
    return _NUMPY[name]


def has_dtype(dtype: np.dtype[Any]) -> bool:
    """Tell whether the format has a data type, whatever its byte order.

    Examples
    --------
    >>> has_dtype(np.dtype(">f4")), has_dtype(np.dtype("U3"))
    (True, False)
    """
    return dtype in _NAMES or dtype.newbyteorder("=") in _NAMES


def dtype_name(dtype: np.dtype[Any], key: str | None = None) -> str:
    """Return the Zarr v3 name of a numpy data type, whatever its byte order.

    Raises
    ------
    DTypeError
        If the format has no such data type (objects, text, dates, records, long doubles).

    Examples
    --------
    >>> dtype_name(np.dtype(">f4"))
    'float32'
    """
    name = _NAMES.get(dtype) or _NAMES.get(dtype.newbyteorder("="))
    if name is None:
        raise DTypeError(
            "the format has no such data type",
            key,
            expected="one of " + ", ".join(DTYPES),
            found=str(dtype),
            remedy="Save its tolist(), or view it as a data type of the same width",
        )
    return name


@lru_cache(maxsize=MAX_KNOWN)
def node_name(key: str) -> str:
    """Return the name of the Zarr node of `key`: injective, also on file systems that ignore case or Unicode form.

    Lower-case ASCII keys are their own name. Separators are escaped with ``~``; a key with other letters gets a hash
    appended, since some file systems ignore case; a long key is shortened and gets a hash.

    Examples
    --------
    >>> node_name("layers.0.weight"), node_name("a/b"), node_name("")
    ('layers.0.weight', 'a~1b', '~e')
    >>> node_name("W") == node_name("w")
    False
    """
    if _PLAIN_NAME.fullmatch(key) and key not in _RESERVED:
        return key
    name = "".join(_ESCAPES.get(c) or (f"~x{ord(c):02x}" if ord(c) < 32 or ord(c) == 127 else c) for c in key)
    if not name:
        return "~e"
    if name.startswith("__"):
        name = "~u" + name[1:]
    if name.startswith(".") or name in _RESERVED:
        name = "~d" + name
    if name.isascii() and name == name.lower() and len(name) <= MAX_NAME_NBYTES:
        return name
    tag = "~h" + xxhash.xxh3_128_hexdigest(key.encode())
    head = name.encode()[: MAX_NAME_NBYTES - len(tag)].decode(errors="ignore")
    return head + tag


@lru_cache(maxsize=1024)  # thousands of arrays have one chunk
def chunk_name(index: tuple[int, ...]) -> str:
    """Return the name of a chunk under its node (Zarr's ``default`` encoding with separator ``.``).

    Examples
    --------
    >>> chunk_name((1, 0)), chunk_name(())
    ('c.1.0', 'c')
    """
    return ".".join(("c", *map(str, index)))


def chunk_path(key: str, index: tuple[int, ...]) -> str:
    """Return the name of a chunk in its store.

    Examples
    --------
    >>> chunk_path("a/b", (1, 0))
    'a~1b/c.1.0'
    """
    return f"{node_name(key)}/{chunk_name(index)}"


def metadata_path(key: str) -> str:
    """Return the name of an array's metadata in its store.

    Examples
    --------
    >>> metadata_path("a/b")
    'a~1b/zarr.json'
    """
    return f"{node_name(key)}/{ROOT}"


def digest(array: Array) -> bytes:
    """Return the xxh3-128 digest of an array's elements in C order, little-endian.

    Examples
    --------
    >>> digest(np.zeros(3, "f4")) == digest(np.zeros((3, 1), "i4"))
    True
    """
    return digest_bytes(as_bytes(array))


def digest_bytes(data: memoryview | bytes) -> bytes:
    """Return the xxh3-128 digest of bytes, 16 bytes, most significant first."""
    return xxhash.xxh3_128_digest(data)


def as_bytes(array: Array) -> memoryview:
    """Return the elements in C order as a flat memory view; copied only if the array is not C-contiguous."""
    return array.ravel().view(_BYTE).data


def is_raw(layout: Layout) -> bool:
    """Tell whether a chunk file holds plain elements, so that it can be written and read, also in part, directly."""
    return not layout.codecs


@lru_cache(maxsize=MAX_KNOWN)
def array_metadata(spec: ArraySpec, layout: Layout) -> bytes:
    """Return the ``zarr.json`` of an array (sorted keys, no spaces).

    Examples
    --------
    >>> text = array_metadata(ArraySpec("w", (4,), "int8"), Layout("exclusive", (2,), (), "int8"))
    >>> json.loads(text)["dimension_names"]
    ['w:0']
    """
    key = encode_basestring_ascii(spec.key)[1:-1].encode()
    return key.join(_metadata_parts(spec.shape, spec.dtype, layout))


def named_metadata(spec: ArraySpec, layout: Layout) -> bytes:
    """Return the ``zarr.json`` of an array after the name of its node, as a member of an object of JSON.

    Examples
    --------
    >>> named_metadata(ArraySpec("w", (4,), "int8"), Layout("exclusive", (2,), (), "int8"))[:17]
    b'"w":{"attributes"'
    """
    return encode_basestring_ascii(node_name(spec.key)).encode() + b":" + array_metadata(spec, layout)


@lru_cache(maxsize=1024)
def _metadata_parts(shape: tuple[int, ...], dtype: str, layout: Layout) -> list[bytes]:
    """Return the text around the key, for all arrays that differ only in that: encoding it dominates small saves."""
    ours: dict[str, Any] = {"key": "\0"}  # stands for the key; nothing else there can contain it
    if layout.stored != dtype:
        ours["dtype"] = dtype
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": layout.stored,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(layout.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _fill_value(layout.stored),
        "codecs": [_bytes_codec(layout.stored), *map(_codec, layout.codecs)],
        "dimension_names": [f"\0:{axis}" for axis in range(len(shape))],
        "attributes": {"functional_ckpt": ours},
    }
    return to_json(document).split(json.dumps("\0")[1:-1].encode())


def to_json(document: object) -> bytes:
    """Return JSON text for people and Zarr tools: sorted keys, no spaces."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _fill_value(dtype: str) -> Any:
    kind = DTYPES[dtype][1]
    if kind == 0:
        return False
    return [0.0, 0.0] if kind == 4 else 0.0 if kind == 3 else 0


def _bytes_codec(dtype: str) -> dict[str, Any]:
    return {"name": "bytes", "configuration": {"endian": "little"}} if DTYPES[dtype][0] > 1 else {"name": "bytes"}


def _codec(codec: str) -> dict[str, Any]:
    name, _, level = codec.partition(":")
    if name == "crc32c":
        return {"name": name}
    if name == "zstd":
        return {"name": name, "configuration": {"level": int(level or 0), "checksum": False}}
    if name == "gzip":
        return {"name": name, "configuration": {"level": int(level or 5)}}
    configuration = {"cname": "lz4", "clevel": int(level or 5), "shuffle": "noshuffle", "blocksize": 0, "typesize": 1}
    return {"name": "blosc", "configuration": configuration}
