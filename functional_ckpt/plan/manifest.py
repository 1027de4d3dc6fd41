"""`Manifest`: what a committed checkpoint contains, as a value and as canonical JSON.

The text holds no rank, id or time, so that saving the same state twice gives the same bytes. A path is written only
if it differs from the key split at its dots. Reading accepts unknown fields of the same major version and raises an
error for anything else that is not a manifest.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import attrs

from functional_ckpt.errors import CheckpointError, CorruptionError, FormatVersionError
from functional_ckpt.plan.check import check_unique_keys
from functional_ckpt.plan.entry import DIGEST_NBYTES, Alias, ArrayEntry, PerRankEntry, RankItem, ValueEntry
from functional_ckpt.plan.layout import Layout, check_codecs, grid_of
from functional_ckpt.plan.record import Frame, array_text, canonical, frame_of, listed, path_text
from functional_ckpt.plan.timings import Timings
from functional_ckpt.show.html import tree_html
from functional_ckpt.show.outline import outline_of
from functional_ckpt.spec.array import BITS, check_key, known_spec
from functional_ckpt.spec.tree import DictKey, Path

__all__ = [
    "DIGEST_NBYTES",
    "FORMAT",
    "VERSION",
    "Alias",
    "ArrayEntry",
    "Manifest",
    "PerRankEntry",
    "RankItem",
    "ValueEntry",
    "check_version",
]

FORMAT = "functional_ckpt"
#: The newest version that is written. A manifest without newer features is written as 1.0, byte for byte as before.
VERSION = (1, 1)

_TAG = re.compile(r'"(~[A-Za-z_.]+)":')
_TAGS_1_0 = frozenset((
    "~int", "~float", "~tuple", "~set", "~frozenset", "~dict", "~ordered", "~counter", "~bytes", "~complex", "~range",
    "~torch.Size", "~torch.dtype", "~torch.device",
))  # fmt: skip


@attrs.frozen(repr=False)
class Manifest:
    """Everything a checkpoint contains, sorted by key. That of a save tells its `timings` on this rank, too.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> entry = ArrayEntry(ArraySpec("w", (2,), "int8"), Layout("exclusive", (2,), (), "int8"), bytes(16))
    >>> manifest = Manifest((entry,))
    >>> Manifest.from_json(manifest.to_json()) == manifest
    True
    >>> manifest
    Manifest(1 array, 2 parameters, 2 B in 1 chunk)
    """

    arrays: tuple[ArrayEntry, ...] = ()
    values: tuple[ValueEntry, ...] = ()
    aliases: tuple[Alias, ...] = ()
    per_rank: tuple[PerRankEntry, ...] = ()
    attributes: str = "{}"
    timings: Timings | None = attrs.field(default=None, eq=False)

    def __repr__(self) -> str:
        """Return counts and bytes; a manifest may have thousands of entries."""
        return f"Manifest({outline_of(self).summary})"

    def _repr_html_(self) -> str | None:
        """Return the tree of keys, for a notebook."""
        return tree_html("Manifest", outline_of(self))

    @cached_property
    def by_key(self) -> Mapping[str, ArrayEntry]:
        """Arrays by key, aliases included."""
        found = {entry.spec.key: entry for entry in self.arrays}
        return {**found, **{alias.key: found[alias.target] for alias in self.aliases}}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(entry.spec.nbytes for entry in self.arrays)

    @property
    def version(self) -> tuple[int, int]:
        """The lowest version of the format that has all features which this manifest uses."""
        newer = any(entry.codec == "json" for entry in self.arrays)
        texts = (*(value.text for value in self.values), self.attributes)
        tags = {tag for text in texts if '"~' in text for tag in _TAG.findall(text)}
        return VERSION if newer or tags - _TAGS_1_0 else (1, 0)

    def to_json(self, frames: Iterable[Frame] | None = None) -> bytes:
        """Return the canonical text (UTF-8, sorted keys, no spaces); `frames` are those of the arrays, if at hand."""
        if frames is None:
            frames = (frame_of(entry.spec, entry.layout, entry.path, entry.codec) for entry in self.arrays)
        members = {
            "format": canonical(FORMAT),
            "version": canonical(self.version),
            "arrays": listed([array_text(*each) for each in zip(self.arrays, frames, strict=True)]),
            "values": _records(({"key": v.key, "value": json.loads(v.text)}, v) for v in self.values),
            "aliases": _records(({"key": a.key, "target": a.target}, a) for a in self.aliases),
            "per_rank": _records(({"key": p.key, "world_size": p.world_size}, p) for p in self.per_rank),
            "attributes": canonical(json.loads(self.attributes)),
        }
        return ("{" + ",".join(f'"{name}":{text}' for name, text in sorted(members.items())) + "}").encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """Parse the text of a manifest.

        Raises
        ------
        FormatVersionError
            If it was written by a newer major version.
        CorruptionError
            If it is not a manifest.
        """
        try:
            return _parse(json.loads(data, parse_constant=_refuse))
        except CheckpointError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            raise CorruptionError("the manifest cannot be read", found=f"{type(error).__name__}: {error}") from None


def check_version(version: Any) -> None:
    """Raise `FormatVersionError` if ``[major, minor]`` is newer than this library reads.

    Examples
    --------
    >>> check_version([1, 7])
    """
    major, minor = (_int(n) for n in _list(version))
    if min(major, minor) < 0:
        raise ValueError(f"no version: {version}")
    if major > VERSION[0]:
        raise FormatVersionError(
            "the checkpoint was written by a newer version of the format",
            expected=f"major version {VERSION[0]}",
            found=f"{major}.{minor}",
            remedy="Update functional_ckpt to read it",
        )


def _records(entries: Iterable[tuple[dict[str, Any], Any]]) -> str:
    """Return the text of a list. Only one record exists at a time: thousands would make the garbage collector run."""
    return listed(canonical(_placed(record, entry)) for record, entry in entries)


def path_from_json(coded: Any) -> Path:
    """Return the path that `path_to_json` wrote."""
    path: list[Any] = []
    for item in _list(coded):
        if isinstance(item, dict):
            path.append(RankItem(_int(item["rank"])))
        elif isinstance(item, list):
            if len(item) != 1 or isinstance(item[0], (list, dict, str)):
                raise ValueError(f"a path holds {item!r}")
            path.append(DictKey(item[0]))
        else:
            path.append(item if isinstance(item, str) else _int(item))
    return tuple(path)


def _placed(record: dict[str, Any], entry: Any) -> dict[str, Any]:
    text = path_text(record["key"], entry.path)
    return record if text is None else {**record, "path": json.loads(text)}


def _path_of(record: Mapping[str, Any]) -> Path | None:
    if "path" not in record:
        return tuple(_str(record["key"]).split("."))
    return None if record["path"] is None else path_from_json(record["path"])


def _array_from_json(record: Mapping[str, Any]) -> ArrayEntry:
    shape, chunk = _ints(record["shape"]), _ints(record["chunk"])
    spec = known_spec(_str(record["key"]), shape, _str(record["dtype"]))
    codecs = tuple(_str(c) for c in _list(record["codecs"])) if "codecs" in record else ()
    stored = _str(record.get("stored", spec.dtype))
    ownership = _str(record.get("ownership", "exclusive"))
    digests = _list(record["digests"])
    layout = _layout(shape, spec.dtype, len(digests), ownership, chunk, codecs, stored)
    if layout is None:
        raise CorruptionError("an array of the manifest is inconsistent", spec.key, shape=shape, found=chunk)
    object_codec = record.get("codec")
    if object_codec is not None and (
        object_codec not in ("json", "torch") or spec.dtype != "uint8" or len(shape) != 1 or not digests
    ):
        raise CorruptionError("an object of the manifest is inconsistent", spec.key, shape=shape, found=object_codec)
    return ArrayEntry(spec, layout, _digests(spec.key, digests), _path_of(record), object_codec)


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


def _parse(document: Any) -> Manifest:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptionError(
            "this is not a manifest of functional_ckpt", expected=FORMAT, found=type(document).__name__
        )
    check_version(document["version"])
    records = _list(document["arrays"])
    records.reverse()
    manifest = Manifest(
        # Each record goes before the next is read: thousands would make the garbage collector run.
        tuple(_array_from_json(records.pop()) for _ in range(len(records))),
        tuple(ValueEntry(_key(r), canonical(r["value"]), _path_of(r)) for r in _list(document["values"])),
        tuple(Alias(_key(r), _key({"key": r["target"]}), _path_of(r)) for r in _list(document["aliases"])),
        tuple(PerRankEntry(_key(r), _world_size(r), _path_of(r)) for r in _list(document["per_rank"])),
        canonical(_dict(document["attributes"])),
    )
    _check_keys(manifest)
    return manifest


def _check_keys(manifest: Manifest) -> None:
    keys = [e.spec.key for e in manifest.arrays] + [v.key for v in manifest.values] + [a.key for a in manifest.aliases]
    stored = {entry.spec.key for entry in manifest.arrays}
    lost = [a.target for a in manifest.aliases if a.target not in stored]
    doubled = check_unique_keys(keys)
    if lost or doubled:
        key = lost[0] if lost else doubled[0].key
        raise CorruptionError("keys of the manifest are inconsistent", key)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"expected a whole number, found {value!r}")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    for value in _list(values):
        _int(value)
    return tuple(values)


def _str(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"expected text, found {value!r}")
    return value


def _key(record: Mapping[str, Any]) -> str:
    key = _str(record["key"])
    check_key(key)
    return key


def _world_size(record: Mapping[str, Any]) -> int:
    size = _int(record["world_size"])
    if size < 1:
        raise ValueError(f"expected a number of ranks, found {size}")
    return size


def _dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise TypeError(f"expected an object, found {value!r}")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"expected a list, found {value!r}")
    return value
