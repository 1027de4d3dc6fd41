"""`SavePolicy` and `LoadPolicy`: every choice of a save or load, in one immutable value each."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.spec.tree import has_prefix

__all__ = ["LoadPolicy", "SavePolicy", "Strict"]

_GIB = 2**30


def _one_of(*allowed: str) -> Callable[[Any, Any, Any], None]:
    def check(_policy: Any, field: Any, value: Any) -> None:
        if value not in allowed:
            raise PolicyError(f"{field.name} is unknown", expected=" or ".join(map(repr, allowed)), found=repr(value))

    return check


def _positive(_policy: Any, field: Any, value: Any) -> None:
    if not value > 0:
        raise PolicyError(f"{field.name} must be positive", found=value)


@attrs.frozen(kw_only=True)
class SavePolicy:
    """How to save.

    Parameters
    ----------
    layout
        Chunk sizes, codecs and data types, see `LayoutPolicy`.
    replicas
        Who writes a shard that several ranks hold: ``"elect"`` (a hash spreads the work) or ``"declared"``
        (the copy whose replica id is zero; it must exist once).
    replicated
        Plain tensors and values under one key on several ranks are copies: ``"check"`` compares their digests,
        ``"trust"`` does not.
    durability
        ``"none"`` (survives a crash of the process), ``"fsync"`` (each file; survives a power cut), ``"syncfs"``
        (the whole file system, once per rank), ``"auto"`` (fsync, or syncfs where a rank writes many files).
    commit
        ``"rename"`` a finished sibling directory onto the path, ``"marker"``: write in place, the root
        last; ``"auto"``: rename where the store can.
    object_codec
        ``"torch"`` lets leaves that are neither arrays nor plain values be written with ``torch.save``.
    consolidate
        Put all arrays' metadata into the root as well (left out when it would hide the group from plain zarr).
    budget_nbytes
        Extra host memory for the pieces in flight on this rank, in bytes; one piece is always allowed. The copy that
        `async_save` makes of the state comes on top.
    timeout_s
        Longest wait for another rank, in seconds.

    Raises
    ------
    PolicyError
        For a value that is not listed above.

    Examples
    --------
    >>> SavePolicy(durability="never")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.PolicyError: durability is unknown: expected 'auto' or 'fsync' or ...
    """

    layout: LayoutPolicy = attrs.field(factory=LayoutPolicy, validator=attrs.validators.instance_of(LayoutPolicy))
    replicas: str = attrs.field(default="elect", validator=_one_of("elect", "declared"))
    replicated: str = attrs.field(default="check", validator=_one_of("check", "trust"))
    durability: str = attrs.field(default="auto", validator=_one_of("auto", "fsync", "syncfs", "none"))
    commit: str = attrs.field(default="auto", validator=_one_of("auto", "rename", "marker"))
    object_codec: str | None = attrs.field(default=None, validator=attrs.validators.optional(_one_of("torch")))
    consolidate: bool = True
    budget_nbytes: int = attrs.field(default=_GIB, validator=_positive)
    timeout_s: float = attrs.field(default=600.0, converter=float, validator=_positive)


@attrs.frozen
class Strict:
    """What to do with keys that only one side has: ``"raise"``, ``"report"`` (a warning) or ``"ignore"``.

    Examples
    --------
    >>> Strict(unexpected="ignore").missing
    'raise'
    """

    missing: str = attrs.field(default="raise", validator=_one_of("raise", "report", "ignore"))
    unexpected: str = attrs.field(default="raise", validator=_one_of("raise", "report", "ignore"))


def _strict(value: "Strict | str") -> Strict:
    return Strict(value, value) if isinstance(value, str) else value


def _prefixes(value: Any) -> Any:
    if value is None or callable(value):
        return value
    return (value,) if isinstance(value, str) else tuple(value)


def _renames(value: Any) -> Any:
    if value is None or callable(value):
        return value
    return tuple(value.items()) if isinstance(value, Mapping) else tuple(map(tuple, value))


@attrs.frozen(kw_only=True)
class LoadPolicy:
    """How to load.

    Parameters
    ----------
    cast
        Data type changes: ``"error"``, ``"same_kind"`` (numpy's rule) or ``"any"``.
    strict
        Keys that only the checkpoint or only `like` has: a `Strict`, or one word for both.
    keys
        Load only these keys: prefixes at dots (``"model"`` is ``model`` and ``model.*``), or a function of the key.
        The other leaves of `like` stay as they are.
    rename
        Where a leaf's key is stored: ``{"new.prefix": "stored.prefix"}`` (at dots), or a function.
    verify
        Digests: of chunks that are read whole (``"covered"``; plain ones of up to 64 KiB, and encoded ones are), of all
        that are touched (``"full"``: reads them whole), or ``"none"``.
    per_rank
        `PerRank` values saved by another number of ranks: ``"error"``, ``"first"``, or a function of
        ``(values of all saving ranks, rank, size)``.
    allow_shape_mismatch
        Align arrays of another shape at the origin and fill with zeros.
    safe_globals
        Classes that ``torch.load(weights_only=True)`` may build in objects; ``"trust"`` allows all (a pickle can
        run code).
    device
        Where meta tensors are allocated, such as ``"cuda"``.
    read_once
        Read each chunk that several ranks want on one of them and exchange the pieces: less to read, more to send.
        On a group that cannot exchange data every rank reads what it needs.
    budget_nbytes
        Extra host memory for the pieces in flight on this rank, in bytes. With `read_once` it must hold the largest
        chunk that several ranks want three times.
    timeout_s
        Longest wait for another rank, in seconds.

    Examples
    --------
    >>> LoadPolicy(strict="report").strict
    Strict(missing='report', unexpected='report')
    """

    cast: str = attrs.field(default="error", validator=_one_of("error", "same_kind", "any"))
    strict: Strict = attrs.field(factory=Strict, converter=_strict)
    keys: tuple[str, ...] | Callable[[str], bool] | None = attrs.field(default=None, converter=_prefixes)
    rename: tuple[tuple[str, str], ...] | Callable[[str], str] | None = attrs.field(default=None, converter=_renames)
    verify: str = attrs.field(default="covered", validator=_one_of("covered", "full", "none"))
    per_rank: str | Callable[..., Any] = "error"
    allow_shape_mismatch: bool = False
    safe_globals: Iterable[Any] | str = ()
    device: str = "cpu"
    read_once: bool = False
    budget_nbytes: int = attrs.field(default=_GIB, validator=_positive)
    timeout_s: float = attrs.field(default=600.0, converter=float, validator=_positive)

    def __attrs_post_init__(self) -> None:
        if not callable(self.per_rank) and self.per_rank not in ("error", "first"):
            raise PolicyError(
                "per_rank is unknown", expected="'error', 'first' or a function", found=repr(self.per_rank)
            )
        if isinstance(self.safe_globals, str) and self.safe_globals != "trust":
            raise PolicyError("safe_globals is unknown", expected="classes, or 'trust'", found=repr(self.safe_globals))

    def selects(self, key: str) -> bool:
        """Tell whether the leaf `key` is to be loaded.

        Examples
        --------
        >>> LoadPolicy(keys="model").selects("model.w"), LoadPolicy(keys="model").selects("models")
        (True, False)
        """
        if self.keys is None:
            return True
        if callable(self.keys):
            return bool(self.keys(key))
        return any(has_prefix(key, prefix) for prefix in self.keys)

    def stored_key(self, key: str) -> str:
        """Return the key under which the leaf `key` is stored; the longest matching prefix wins.

        Examples
        --------
        >>> LoadPolicy(rename={"net": "model"}).stored_key("net.w")
        'model.w'
        """
        if self.rename is None:
            return key
        if callable(self.rename):
            return self.rename(key)
        for new, stored in sorted(self.rename, key=lambda pair: -len(pair[0])):
            if has_prefix(key, new):
                rest = key[len(new) :].strip(".")
                return ".".join(part for part in (stored.rstrip("."), rest) if part)
        return key
