"""The arrays that a manifest lists: `array_of` a record, `split_arrays` of a text, `arrays_of` the parts.

Thousands of records differ in nothing but key, path and digest. Of those that are just as they would be written here
one is parsed; of the others only what differs is read. Any other record is parsed by itself.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from functional_ckpt.errors import CorruptionError
from functional_ckpt.plan.entry import DIGEST_NBYTES, ArrayEntry, RankItem
from functional_ckpt.plan.layout import Layout, check_codecs, grid_of
from functional_ckpt.plan.record import array_text, frame_of
from functional_ckpt.spec.array import BITS, known_spec
from functional_ckpt.spec.tree import DictKey, Path

__all__ = [
    "array_of",
    "arrays_of",
    "list_of",
    "loads",
    "path_from_json",
    "path_of",
    "split_arrays",
    "text_of",
    "whole_number",
]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_BEGIN, _BETWEEN, _END = '"arrays":[{"chunk":', '},{"chunk":', '}],"attributes":'


def loads(text: str | bytes) -> Any:
    """Return a document of JSON, without NaN and infinities.

    Examples
    --------
    >>> loads("[NaN]")
    Traceback (most recent call last):
    ...
    ValueError: NaN is not JSON
    """
    return _DECODER.decode(text) if isinstance(text, str) else json.loads(text, parse_constant=_refuse)


def split_arrays(text: str) -> tuple[dict[str, Any], list[str]] | None:
    """Return a manifest with no arrays, and the text of the record of each behind its first name.

    None if that is not how the text is written. `ValueError` if what is left is no JSON.

    Examples
    --------
    >>> split_arrays('{"aliases":[],"arrays":[{"chunk":[2]},{"chunk":[3]}],"attributes":{}}')
    ({'aliases': [], 'arrays': [], 'attributes': {}}, ['[2]', '[3]'])
    """
    begin, end = text.find(_BEGIN), text.find(_END)
    if not 0 <= begin < end:
        return None
    # What is left and right of the list is JSON by itself only if the list is a member of the document.
    left, right = loads(text[:begin] + '"arrays":[]}'), loads("{" + text[end + len("}],") :])
    if "arrays" in right:
        return None
    return {**left, **right}, text[begin + len(_BEGIN) : end].split(_BETWEEN)


def arrays_of(texts: Iterable[str]) -> Iterator[ArrayEntry]:
    """Yield the arrays of the records that `split_arrays` returns; `CorruptionError` if one is inconsistent.

    Examples
    --------
    >>> digest, rest = "0" * 32, '"dtype":"int8","key":"w","shape":[2]'
    >>> [entry.spec.key for entry in arrays_of([f'[2],"digests":["{digest}"],{rest}'])]
    ['w']
    """
    known: dict[tuple[str, ...], ArrayEntry | None] = {}
    for text in texts:
        # The frame is all that remains of the text without digest, key and path.
        before, _, digest = text.partition('"digests":["')
        digest, between = digest[: 2 * DIGEST_NBYTES], digest[2 * DIGEST_NBYTES :]
        if not between.startswith('"]'):  # no digest, or several
            yield array_of(loads(_record(text)))
            continue
        between, _, key = between.partition('"key":"')
        key, _, after = key.partition('"')
        after, has_path, path = after.partition('"path":')
        path, _, shape = path.partition(',"shape":')
        frame = before, between, after, has_path, shape
        like, found = known.get(frame), bytes.fromhex(digest)
        if like is None or len(found) != DIGEST_NBYTES or not _is_plain(key):
            entry = array_of(loads(_record(text)))
            if frame not in known:
                known[frame] = entry if _is_plain(key) and _is_as_written(entry, text) else None
            yield entry
            continue
        spec = known_spec(key, like.spec.shape, like.spec.dtype)
        yield ArrayEntry(spec, like.layout, found, _path_in(path) if has_path else _told(key), like.codec)


def _record(text: str) -> str:
    """Return the whole text of a record that `split_arrays` has cut."""
    return '{"chunk":' + text + "}"


def _is_as_written(entry: ArrayEntry, text: str) -> bool:
    """Tell whether a record has no other fields, order or spelling than that which is written here."""
    frame = frame_of(entry.spec, entry.layout, entry.path, entry.codec)
    return array_text(entry, frame) == _record(text)


def _is_plain(text: str) -> bool:
    """Tell whether the text between two quotes of JSON stands for itself."""
    return "\\" not in text and text.isprintable()


def _path_in(text: str) -> Path | None:
    """Return the path of a text of JSON; nearly all are lists of plain texts."""
    items = text[2:-2].split('","')
    if text[:2] == '["' and text[-2:] == '"]' and text.count('"') == 2 * len(items) and _is_plain(text):
        return tuple(items)
    path = loads(text)
    return None if path is None else path_from_json(path)


def _told(key: str) -> Path:
    """Return the path of a record that has none."""
    return tuple(key.split("."))


def path_from_json(coded: Any) -> Path:
    """Return the path that `path_to_json` wrote."""
    path: list[Any] = []
    for item in list_of(coded):
        if isinstance(item, dict):
            path.append(RankItem(whole_number(item["rank"])))
        elif isinstance(item, list):
            if len(item) != 1 or isinstance(item[0], (list, dict, str)):
                raise ValueError(f"a path holds {item!r}")
            path.append(DictKey(item[0]))
        else:
            path.append(item if isinstance(item, str) else whole_number(item))
    return tuple(path)


def path_of(record: Mapping[str, Any]) -> Path | None:
    """Return the path of a record; the key tells it unless it is there."""
    if "path" not in record:
        return _told(text_of(record["key"]))
    return None if record["path"] is None else path_from_json(record["path"])


def array_of(record: Mapping[str, Any]) -> ArrayEntry:
    """Return the array of a parsed record; `CorruptionError` if it is inconsistent."""
    shape, chunk = _ints(record["shape"]), _ints(record["chunk"])
    spec = known_spec(text_of(record["key"]), shape, text_of(record["dtype"]))
    codecs = tuple(text_of(c) for c in list_of(record["codecs"])) if "codecs" in record else ()
    stored = text_of(record.get("stored", spec.dtype))
    ownership = text_of(record.get("ownership", "exclusive"))
    digests = list_of(record["digests"])
    layout = _layout(shape, spec.dtype, len(digests), ownership, chunk, codecs, stored)
    if layout is None:
        raise CorruptionError("an array of the manifest is inconsistent", spec.key, shape=shape, found=chunk)
    object_codec = record.get("codec")
    if object_codec is not None and (
        object_codec not in ("json", "torch") or spec.dtype != "uint8" or len(shape) != 1 or not digests
    ):
        raise CorruptionError("an object of the manifest is inconsistent", spec.key, shape=shape, found=object_codec)
    return ArrayEntry(spec, layout, _digests(spec.key, digests), path_of(record), object_codec)


def _digests(key: str, texts: list[Any]) -> bytes:
    """Return the digests of an array's chunks, which the manifest holds as hexadecimal text."""
    found = bytes.fromhex("".join(texts))
    # As bytes too: blanks in the text count for nothing.
    if {*map(len, texts)} - {2 * DIGEST_NBYTES} or len(found) != len(texts) * DIGEST_NBYTES:
        raise CorruptionError("a digest of the manifest has a wrong length", key)
    return found


# Thousands of arrays have the same layout: it is made and checked once.
@lru_cache(maxsize=1024)
def _layout(
    shape: tuple[int, ...],
    dtype: str,
    digests: int,
    ownership: str,
    chunk: tuple[int, ...],
    codecs: tuple[str, ...],
    stored: str,
) -> Layout | None:
    """Return a layout, or None unless it is one of such an array with so many digests."""
    if len(chunk) != len(shape) or not all(1 <= c <= max(n, 1) for c, n in zip(chunk, shape, strict=True)):
        return None
    if stored not in (dtype, BITS.get(dtype)) or grid_of(shape, chunk).size != digests:
        return None
    check_codecs(codecs)
    return Layout(ownership, chunk, codecs, stored)


def whole_number(value: Any) -> int:
    """Return a whole number, or raise `TypeError`."""
    if type(value) is not int:
        raise TypeError(f"expected a whole number, found {value!r}")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    for value in list_of(values):
        whole_number(value)
    return tuple(values)


def text_of(value: Any) -> str:
    """Return text, or raise `TypeError`."""
    if type(value) is not str:
        raise TypeError(f"expected text, found {value!r}")
    return value


def list_of(value: Any) -> list[Any]:
    """Return a list, or raise `TypeError`."""
    if type(value) is not list:
        raise TypeError(f"expected a list, found {value!r}")
    return value
