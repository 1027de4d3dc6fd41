"""`SavePolicy` and `LoadPolicy`: every choice of a save or load, in one immutable value each."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import attrs

from functional_ckpt.plan.field import (
    as_int,
    as_number,
    as_tuple,
    at_least,
    flag,
    instance_of,
    is_function,
    is_word,
    one_of,
    refuse,
    seconds,
)
from functional_ckpt.plan.layout import LayoutPolicy
from functional_ckpt.plan.save import GIB
from functional_ckpt.run.comm import TIMEOUT_S
from functional_ckpt.spec.tree import has_prefix
from functional_ckpt.store.access import StorePolicy

__all__ = ["LoadPolicy", "SavePolicy", "Strict"]


Replicas: TypeAlias = Literal["elect", "declared"]
Replicated: TypeAlias = Literal["check", "trust"]
Durability: TypeAlias = Literal["auto", "fsync", "syncfs", "none"]
Commit: TypeAlias = Literal["auto", "rename", "marker"]
Staging: TypeAlias = Literal["copy", "none"]
InFlight: TypeAlias = Literal["wait", "refuse", "queue"]
Foreign: TypeAlias = Literal["refuse", "keep"]
ObjectCodec: TypeAlias = Literal["torch"]
Action: TypeAlias = Literal["raise", "report", "ignore"]
Cast: TypeAlias = Literal["error", "same_kind", "any"]
Verify: TypeAlias = Literal["covered", "full", "none"]
PerRankRule: TypeAlias = Literal["error", "first"]
Trust: TypeAlias = Literal["trust"]


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
    foreign
        Files of others at the path, such as the ``meta.pt`` that Lightning puts there: ``"refuse"`` the save, or
        ``"keep"`` them: they are linked into the new checkpoint, and are there at every moment. With `overwrite` it
        then also replaces a checkpoint of DCP. In ``"marker"`` mode files of others always stay.
    metadata_file
        Write a short text named ``.metadata``, too, for programs that look for a checkpoint of DCP by this file.
    object_codec
        ``"torch"`` lets leaves that are neither arrays nor plain values be written with ``torch.save``.
    consolidate
        Put all arrays' metadata into the root as well (left out when it would hide the group from plain zarr).
    budget_nbytes
        Extra host memory for the pieces in flight on this rank, in bytes; one piece is always allowed. The copy that
        `async_save` makes of the state comes on top.
    in_flight
        What `async_save` does while an earlier save of this process runs: ``"wait"`` for it, so that one copy of the
        state is held at a time, ``"refuse"`` (on all ranks, if any is busy), or ``"queue"``: copy the state and save
        it afterwards. `save` waits always.
    staging
        What `async_save` writes from: a ``"copy"`` of the state, or ``"none"``, the state itself: then the caller
        promises not to change or free it before the save has ended.
    staging_nbytes
        Host memory that `async_save` keeps for the next copy, in bytes; None for as much as the last few saves needed,
        0 for none. See `release_staging`.
    timeout_s
        Longest wait for another rank, in seconds.
    store
        How to reach an object store, see `StorePolicy`.

    Raises
    ------
    PolicyError
        For a field of another type, or a value that is not listed above.

    Examples
    --------
    >>> SavePolicy(durability="never")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.PolicyError: SavePolicy does not accept this durability: expected 'auto' or 'fsync' or ...
    """

    layout: LayoutPolicy = attrs.field(factory=LayoutPolicy, validator=instance_of(LayoutPolicy))
    replicas: Replicas = attrs.field(default="elect", validator=one_of(*get_args(Replicas)))
    replicated: Replicated = attrs.field(default="check", validator=one_of(*get_args(Replicated)))
    durability: Durability = attrs.field(default="auto", validator=one_of(*get_args(Durability)))
    commit: Commit = attrs.field(default="auto", validator=one_of(*get_args(Commit)))
    foreign: Foreign = attrs.field(default="refuse", validator=one_of(*get_args(Foreign)))
    metadata_file: bool = attrs.field(default=False, validator=flag)
    object_codec: ObjectCodec | None = attrs.field(
        default=None, validator=attrs.validators.optional(one_of(*get_args(ObjectCodec)))
    )
    consolidate: bool = attrs.field(default=True, validator=flag)
    budget_nbytes: int = attrs.field(default=GIB, converter=as_int, validator=at_least(1))
    in_flight: InFlight = attrs.field(default="wait", validator=one_of(*get_args(InFlight)))
    staging: Staging = attrs.field(default="copy", validator=one_of(*get_args(Staging)))
    staging_nbytes: int | None = attrs.field(
        default=None, converter=as_int, validator=attrs.validators.optional(at_least(0))
    )
    timeout_s: float = attrs.field(default=TIMEOUT_S, converter=as_number, validator=seconds)
    store: StorePolicy = attrs.field(factory=StorePolicy, validator=instance_of(StorePolicy))


@attrs.frozen
class Strict:
    """What to do with keys that only one side has: ``"raise"``, ``"report"`` (a warning) or ``"ignore"``.

    Examples
    --------
    >>> Strict(unexpected="ignore").missing
    'raise'
    """

    missing: Action = attrs.field(default="raise", validator=one_of(*get_args(Action)))
    unexpected: Action = attrs.field(default="raise", validator=one_of(*get_args(Action)))


def _flag_or_none(policy: Any, field: Any, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise refuse(policy, field.name, "True, False, or None for what suits the store", value)


def _strict(value: Strict | Action | bool) -> Any:
    if isinstance(value, bool):
        return Strict() if value else Strict("report", "report")
    if isinstance(value, str) and value in get_args(Action):
        return Strict(value, value)
    return value


def _check_strict(policy: Any, field: Any, value: Any) -> None:
    if not isinstance(value, Strict):
        raise refuse(policy, field.name, "'raise' or 'report' or 'ignore', True or False, or a Strict", value)


def _prefixes(value: str | Iterable[str] | Callable[[str], bool] | None) -> Any:
    if value is None or callable(value):
        return value
    return (value,) if isinstance(value, str) else as_tuple(value)


def _check_keys(policy: Any, field: Any, value: Any) -> None:
    texts = isinstance(value, tuple) and all(isinstance(prefix, str) for prefix in value)
    if not (value is None or texts or is_function(value)):
        raise refuse(policy, field.name, "key prefixes, or a function of a key", value)


def _renames(value: Mapping[str, str] | Iterable[tuple[str, str]] | Callable[[str], str] | None) -> Any:
    if value is None or callable(value):
        return value
    pairs = as_tuple(value.items() if isinstance(value, Mapping) else value)
    return tuple(map(as_tuple, pairs)) if isinstance(pairs, tuple) else value


def _is_renaming(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(prefix, str) for prefix in pair)


def _check_rename(policy: Any, field: Any, value: Any) -> None:
    if value is None or is_function(value):
        return
    if not isinstance(value, tuple) or not all(map(_is_renaming, value)):
        raise refuse(policy, field.name, "{prefix in `like`: stored prefix}, or a function of a key", value)
    stems = [new.rstrip(".") for new, _ in value]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise refuse(policy, field.name, "each prefix once", twice)


def _classes(value: type | Iterable[Any] | Trust) -> Any:
    return (value,) if isinstance(value, type) else as_tuple(value)  # an Enum can be iterated


def _is_global(value: Any) -> bool:
    named = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str)
    return is_function(value[0] if named else value)


def _check_globals(policy: Any, field: Any, value: Any) -> None:
    if not (isinstance(value, tuple) and all(map(_is_global, value))) and not is_word(value, "trust"):
        raise refuse(policy, field.name, "classes and functions, or 'trust'", value)


def _check_per_rank(policy: Any, field: Any, value: Any) -> None:
    if not is_function(value) and not is_word(value, *get_args(PerRankRule)):
        raise refuse(policy, field.name, "'error' or 'first', or a function of (values, rank, size)", value)


def _device(value: Any) -> Any:
    """Return a ``torch.device`` as its name; torch itself is not imported."""
    return str(value) if type(value).__module__ == "torch" and type(value).__qualname__ == "device" else value


def _check_device(policy: Any, field: Any, value: Any) -> None:
    if not isinstance(value, str):
        raise refuse(policy, field.name, "the name of a device, such as 'cuda'", value)


@attrs.frozen(kw_only=True)
class LoadPolicy:
    """How to load.

    Parameters
    ----------
    cast
        Data type changes: ``"error"``, ``"same_kind"`` (numpy's rule) or ``"any"``.
    strict
        Keys that only the checkpoint or only `like` has: a `Strict`, or one word for both. As in torch's
        ``load_state_dict``, False loads what fits and warns about the rest (``"report"``).
    keys
        Load only these keys: prefixes at dots (``"model"`` is ``model`` and ``model.*``), or a function of the key.
        The other leaves of `like` stay as they are.
    rename
        Where a leaf's key is stored: ``{"new.prefix": "stored.prefix"}`` (at dots), or a function. Like `keys` it takes
        the names in `like`; a load refuses prefixes of either that no key of any rank has.
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
        Where meta tensors are allocated: a name such as ``"cuda"``, or a ``torch.device``.
    read_once
        Read each chunk that several ranks want on one of them and exchange the pieces: less to read, more to send.
        On a group that cannot exchange data every rank reads what it needs. None: from an object store, as far as the
        budget allows.
    budget_nbytes
        Extra host memory for the pieces in flight on this rank, in bytes. With `read_once` at
        least three times the largest chunk that several ranks want.
    timeout_s
        Longest wait for another rank, in seconds.
    store
        How to reach an object store, see `StorePolicy`.

    Examples
    --------
    >>> LoadPolicy(strict="report").strict
    Strict(missing='report', unexpected='report')
    """

    cast: Cast = attrs.field(default="error", validator=one_of(*get_args(Cast)))
    strict: Strict = attrs.field(factory=Strict, converter=_strict, validator=_check_strict)
    keys: tuple[str, ...] | Callable[[str], bool] | None = attrs.field(
        default=None, converter=_prefixes, validator=_check_keys
    )
    rename: tuple[tuple[str, str], ...] | Callable[[str], str] | None = attrs.field(
        default=None, converter=_renames, validator=_check_rename
    )
    verify: Verify = attrs.field(default="covered", validator=one_of(*get_args(Verify)))
    per_rank: PerRankRule | Callable[..., Any] = attrs.field(default="error", validator=_check_per_rank)
    allow_shape_mismatch: bool = attrs.field(default=False, validator=flag)
    safe_globals: tuple[Any, ...] | Trust = attrs.field(default=(), converter=_classes, validator=_check_globals)
    device: str = attrs.field(default="cpu", converter=_device, validator=_check_device)
    read_once: bool | None = attrs.field(default=None, validator=_flag_or_none)
    budget_nbytes: int = attrs.field(default=GIB, converter=as_int, validator=at_least(1))
    timeout_s: float = attrs.field(default=TIMEOUT_S, converter=as_number, validator=seconds)
    store: StorePolicy = attrs.field(factory=StorePolicy, validator=instance_of(StorePolicy))

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
