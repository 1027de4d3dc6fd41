"""`Manifest`: what a committed checkpoint contains, as a value and as canonical JSON.

The text holds no rank, id or time, so that saving the same state twice gives the same bytes. A path is written only
if it differs from the key split at its dots. Reading accepts unknown fields of the same major version and raises an
error for anything else that is not a manifest.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import attrs

from functional_ckpt.errors import CheckpointError, CorruptionError, FormatVersionError
from functional_ckpt.plan.check import check_unique_keys
from functional_ckpt.plan.entry import DIGEST_NBYTES, Alias, ArrayEntry, PerRankEntry, RankItem, ValueEntry
from functional_ckpt.plan.listing import (
    array_of,
    arrays_of,
    list_of,
    loads,
    path_of,
    split_arrays,
    text_of,
    whole_number,
)
from functional_ckpt.plan.record import Frame, array_text, canonical, frame_of, listed, path_text
from functional_ckpt.plan.timings import Timings
from functional_ckpt.show.html import tree_html
from functional_ckpt.show.outline import outline_of
from functional_ckpt.spec.array import check_key

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

_UNREADABLE = (
    CheckpointError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError,
)  # fmt: skip
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
    >>> from functional_ckpt.plan.layout import Layout
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
            return _parse(data)
        except CheckpointError:
            raise
        except _UNREADABLE as error:
            raise CorruptionError("the manifest cannot be read", found=f"{type(error).__name__}: {error}") from None


def check_version(version: Any) -> None:
    """Raise `FormatVersionError` if ``[major, minor]`` is newer than this library reads.

    Examples
    --------
    >>> check_version([1, 7])
    """
    major, minor = (whole_number(n) for n in list_of(version))
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


def _placed(record: dict[str, Any], entry: Any) -> dict[str, Any]:
    text = path_text(record["key"], entry.path)
    return record if text is None else {**record, "path": json.loads(text)}


def _parse(data: bytes) -> Manifest:
    with suppress(*_UNREADABLE):  # what is wrong shows when all of it is parsed
        split = split_arrays(data.decode())
        if split is not None:
            return _manifest_of(split[0], arrays_of(split[1]))
    return _manifest_of(loads(data))


def _manifest_of(document: Any, arrays: Iterable[ArrayEntry] | None = None) -> Manifest:
    """Return the manifest of a parsed text, from which the `arrays` may have been cut."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptionError(
            "this is not a manifest of functional_ckpt", expected=FORMAT, found=type(document).__name__
        )
    check_version(document["version"])
    manifest = Manifest(
        tuple(_popped(list_of(document["arrays"])) if arrays is None else arrays),
        tuple(ValueEntry(_key(r), canonical(r["value"]), path_of(r)) for r in list_of(document["values"])),
        tuple(Alias(_key(r), _key({"key": r["target"]}), path_of(r)) for r in list_of(document["aliases"])),
        tuple(PerRankEntry(_key(r), _world_size(r), path_of(r)) for r in list_of(document["per_rank"])),
        canonical(_dict(document["attributes"])),
    )
    _check_keys(manifest)
    return manifest


def _popped(records: list[Any]) -> Iterator[ArrayEntry]:
    """Yield the arrays of records; each goes before the next is read: thousands would make the collector run."""
    records.reverse()
    return (array_of(records.pop()) for _ in range(len(records)))


def _check_keys(manifest: Manifest) -> None:
    keys = [e.spec.key for e in manifest.arrays] + [v.key for v in manifest.values] + [a.key for a in manifest.aliases]
    stored = {entry.spec.key for entry in manifest.arrays}
    lost = [a.target for a in manifest.aliases if a.target not in stored]
    doubled = check_unique_keys(keys)
    if lost or doubled:
        key = lost[0] if lost else doubled[0].key
        raise CorruptionError("keys of the manifest are inconsistent", key)


def _key(record: Mapping[str, Any]) -> str:
    key = text_of(record["key"])
    check_key(key)
    return key


def _world_size(record: Mapping[str, Any]) -> int:
    size = whole_number(record["world_size"])
    if size < 1:
        raise ValueError(f"expected a number of ranks, found {size}")
    return size


def _dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise TypeError(f"expected an object, found {value!r}")
    return value
