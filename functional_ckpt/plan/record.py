"""The JSON text of a manifest's records: `canonical`, of paths, and the frame around an array's digests."""

import json
from collections.abc import Iterable
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, TypeAlias

from functional_ckpt.plan.entry import DIGEST_NBYTES, ArrayEntry, RankItem
from functional_ckpt.plan.layout import Layout
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.tree import DictKey, Path

__all__ = ["Frame", "array_text", "canonical", "frame_of", "is_told_by", "listed", "path_text", "path_to_json"]

#: The text of an array's record before and after its digests.
Frame: TypeAlias = tuple[str, str]

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(document: object) -> str:
    """Return the one JSON text of a document: sorted keys, ASCII, no spaces, no NaN."""
    return _ENCODER.encode(document)


def listed(texts: Iterable[str]) -> str:
    """Return the text of a list."""
    return "[" + ",".join(texts) + "]"


def path_to_json(path: Iterable[Any]) -> list[Any]:
    """Return a path as JSON: text, int (list position), ``[key]`` (other dict key), ``{"rank": r}``."""
    coded: list[Any] = []
    for item in path:
        if isinstance(item, RankItem):
            coded.append({"rank": item.rank})
        else:
            coded.append([item.value] if isinstance(item, DictKey) else item)
    return coded


def path_text(key: str, path: Path | None) -> str | None:
    """Return the text of a path; None if the key tells it."""
    if path is None:
        return "null"
    if is_told_by(key, path):
        return None
    try:
        return listed(map(encode_basestring_ascii, path))  # type: ignore[arg-type] # nearly all are text
    except TypeError:
        return canonical(path_to_json(path))


def is_told_by(key: str, path: Path) -> bool:
    """Tell whether a path is a key split at its dots.

    Examples
    --------
    >>> is_told_by("a.b", ("a", "b")), is_told_by("a.b", ("a.b",)), is_told_by("0", (0,))
    (True, False, False)
    """
    try:
        return key.count(".") == len(path) - 1 and ".".join(path) == key  # type: ignore[arg-type] # nearly all are text
    except TypeError:
        return False


def array_text(entry: ArrayEntry, frame: Frame) -> str:
    """Return the text of an array's record."""
    before, after = frame
    if len(entry.digests) == DIGEST_NBYTES:  # thousands of arrays have one chunk
        return f'{before}"{entry.digests.hex()}"{after}'
    digests = entry.digests.hex(",", DIGEST_NBYTES).replace(",", '","')
    return f'{before}"{digests}"{after}' if digests else before + after


def frame_of(spec: ArraySpec, layout: Layout, path: Path | None, codec: str | None) -> Frame:
    """Return what stands before and after the digests of an array in a manifest.

    Examples
    --------
    >>> frame_of(ArraySpec("w", (2,), "int8"), Layout("exclusive", (2,), (), "int8"), ("w",), None)
    ('{"chunk":[2],"digests":[', '],"dtype":"int8","key":"w","shape":[2]}')
    """
    told = path_text(spec.key, path)
    before, after = _array_form(spec.shape, spec.dtype, layout, codec, told is not None)
    key = encode_basestring_ascii(spec.key)
    return before, after % (key if told is None else (key, told))


@lru_cache(maxsize=1024)
def _array_form(shape: tuple[int, ...], dtype: str, layout: Layout, codec: str | None, has_path: bool) -> Frame:
    """Return the text around the digests of all arrays that differ only in key and path, with ``%s`` in their places.

    Before the digests there is neither.
    """
    gap = "\0"
    record: dict[str, Any] = {"key": gap, "dtype": dtype, "shape": shape, "chunk": layout.chunk, "digests": []}
    # The common case is left out: exclusive chunks, no codecs, the data type stored as itself.
    if layout.ownership != "exclusive":
        record["ownership"] = layout.ownership
    if layout.codecs:
        record["codecs"] = layout.codecs
    if layout.stored != dtype:
        record["stored"] = layout.stored
    if codec is not None:
        record["codec"] = codec
    if has_path:
        record["path"] = gap
    before, digests, after = canonical(record).partition('"digests":[')
    return before + digests, after.replace("%", "%%").replace(canonical(gap), "%s")
