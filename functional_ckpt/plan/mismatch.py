"""Keys that only one side of a load has: problems as values, summarised if there are many keys."""

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from functional_ckpt.errors import KeyMismatchError
from functional_ckpt.spec.tree import has_prefix

__all__ = ["did_you_mean", "missing_problems", "quoted", "split_by_prefix", "unexpected_problems"]

#: Up to so many keys give a problem each, more give one problem; it names so many of them.
_FEW = 4
_NAMED = 3
#: Comparing one name with so many takes a second; so many pairs of prefixes are tried as the renaming of all keys.
_COMPARED = 10_000
_TRIED = 100
#: Less similar names are not offered: keys below one prefix are similar by that alone.
_SIMILAR = 0.75

_GET_STATE = "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)"
_IGNORING = "LoadPolicy(strict=Strict({}='ignore'))"


def did_you_mean(name: str, names: Collection[str]) -> str | None:
    """Return a question that offers the name most similar to `name`, or None.

    Examples
    --------
    >>> did_you_mean("modle", ["model", "optim"])
    "Did you mean 'model'?"
    """
    close = difflib.get_close_matches(name, names, 1, _SIMILAR) if len(names) < _COMPARED else []
    return f"Did you mean {close[0]!r}?" if close else None


def quoted(keys: Sequence[str]) -> str:
    """Return the first of many keys as text, and how many more there are.

    Examples
    --------
    >>> quoted(["a", "b"]), quoted(["a", "b", "c", "d", "e"])
    ("'a', 'b'", "'a', 'b', 'c' and 2 more")
    """
    text = ", ".join(map(repr, keys[:_NAMED]))
    return f"{text} and {len(keys) - _NAMED} more" if len(keys) > _NAMED else text


def split_by_prefix(keys: Iterable[str], names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the keys below each name that has any, and the other keys.

    Examples
    --------
    >>> split_by_prefix(["a.b", "a.c", "b"], ["a", "c"])
    ({'a': ['a.b', 'a.c']}, ['b'])
    """
    known = frozenset(names)
    below: dict[str, list[str]] = {}
    others: list[str] = []
    for key in keys:
        parts = key.split(".")
        name = next((stem for n in range(len(parts) + 1) if (stem := ".".join(parts[:n])) in known), None)
        (others if name is None else below.setdefault(name, [])).append(key)
    return below, others


def missing_problems(
    missing: Sequence[str], used: Collection[str], stored: Collection[str], empty: Iterable[str], renames: bool
) -> list[KeyMismatchError]:
    """Return problems for keys that `like` has and the checkpoint lacks; `empty` are the containers stored empty.

    `used` are the keys that both have; `renames` tells whether the policy has a `rename` already.

    Examples
    --------
    >>> print(*missing_problems(["module.w"], [], ["w"], [], False))
    the checkpoint has no such key: key 'module.w'. Pass LoadPolicy(rename={'module': ''}), which finds every key
    """
    below, missing = split_by_prefix(missing, empty)
    problems = [_stored_empty(name, keys) for name, keys in below.items()]
    if not missing:
        return problems
    names = sorted(stored)
    free = sorted(frozenset(stored) - frozenset(used))
    repair = _repair(missing, used, free, stored, renames)
    if len(missing) > _FEW:
        what, remedy = (
            f"the checkpoint lacks {len(missing)} keys of `like`",
            repair or _keeping(missing[0], free),
        )
        return [*problems, KeyMismatchError(what, expected=quoted(missing), found=quoted(free or names), remedy=remedy)]
    return problems + [
        KeyMismatchError("the checkpoint has no such key", key, remedy=repair or _keeping(key, free)) for key in missing
    ]


def _keeping(key: str, free: Collection[str]) -> str:
    return " ".join(
        filter(None, [did_you_mean(key, free), f"Pass {_IGNORING.format('missing')} to keep what `like` holds"])
    )


def unexpected_problems(
    extra: Sequence[str], empty: Iterable[str], by_rank: Iterable[str] = ()
) -> list[KeyMismatchError]:
    """Return problems for keys that the checkpoint has and `like` lacks; `empty` are the containers empty in `like`.

    `by_rank` are the keys of `PerRank` values.

    Examples
    --------
    >>> print(*unexpected_problems(["optim.state.0.step"], ["optim.state"]))  # doctest: +ELLIPSIS
    `like` is empty where the checkpoint is not: key 'optim.state', found 'optim.state.0.step'. An optimizer ...
    """
    below, extra = split_by_prefix(extra, empty)
    problems = [_wanted_empty(name, keys) for name, keys in below.items()]
    differing, extra = split_by_prefix(extra, by_rank)
    ignore = f"select with LoadPolicy(keys=...), or pass {_IGNORING.format('unexpected')}"
    what = "the checkpoint has a PerRank value that `like` does not"
    problems += [KeyMismatchError(what, name, remedy=f"Add a PerRank(...), {ignore}") for name in differing]
    if len(extra) > _FEW:
        what = f"the checkpoint has {len(extra)} keys that `like` does not"
        return [*problems, KeyMismatchError(what, found=quoted(extra), remedy=f"Add them, {ignore}")]
    what = "the checkpoint has a key that `like` does not"
    return problems + [KeyMismatchError(what, key, remedy=f"Add it, {ignore}") for key in extra]


def _stored_empty(name: str, keys: Sequence[str]) -> KeyMismatchError:
    return KeyMismatchError(
        "the checkpoint is empty where `like` is not",
        name,
        expected=quoted(keys),
        remedy="It was saved before these values existed: an optimizer has no state before its first step. "
        f"Pass {_IGNORING.format('missing')} to keep what `like` holds",
    )


def _wanted_empty(name: str, keys: Sequence[str]) -> KeyMismatchError:
    if name.rpartition(".")[2] != "state":
        remedy = f"Add the leaves to load, or pass {_IGNORING.format('unexpected')}"
    else:
        remedy = f"An optimizer has no state before its first step. {_filled(name, _are_numbered(keys, name))}"
    return KeyMismatchError("`like` is empty where the checkpoint is not", name, found=quoted(keys), remedy=remedy)


def _filled(name: str, numbered: bool) -> str:
    """Return a remedy that loads the optimizer state `name`; its parameters are `numbered` or named."""
    if not numbered:
        return f"Build `like` with {_GET_STATE}, which creates the state"
    place = "".join(f"[{part!r}]" for part in name.split(".")[:-1])
    return f"Pass open_checkpoint(path).state('torch'){place} to optimizer.load_state_dict"


def _are_numbered(keys: Iterable[str], name: str) -> bool:
    """Tell whether parameters have numbers, as in ``state.0.step``; a name can be ``0.weight``."""
    rests = (key[len(name) :].lstrip(".").split(".") for key in keys)
    return all(len(rest) == 2 and rest[0].isdigit() for rest in rests)


def _other_numbers(missing: Sequence[str], free: Sequence[str]) -> str | None:
    """Return a remedy if one side numbers an optimizer's parameters and the other names them."""
    start, found, _ = missing[0].partition("state.")
    name = f"{start}state"
    wanted = [key for key in missing if found and has_prefix(key, name)]
    stored = [key for key in free if found and has_prefix(key, name)]
    if not wanted or not stored or _are_numbered(wanted, name) == _are_numbered(stored, name):
        return None
    if _are_numbered(wanted, name):
        return f"The checkpoint names an optimizer's parameters, `like` numbers them. {_filled(name, False)}"
    return f"The checkpoint numbers an optimizer's parameters, `like` names them. {_filled(name, True)}"


def _repair(
    missing: Sequence[str], used: Collection[str], free: Sequence[str], stored: Collection[str], renames: bool
) -> str | None:
    """Return what finds the missing keys, or None; a renaming that finds all of them is sure, one of most is not."""
    if renames:
        return _other_numbers(missing, free)
    keys = frozenset(stored)
    whole = _renaming(missing, used, free, keys, len(missing))
    return whole or _other_numbers(missing, free) or _renaming(missing, used, free, keys, -(-len(missing) // 2))


def _renaming(
    missing: Sequence[str], used: Collection[str], free: Sequence[str], stored: frozenset[str], least: int
) -> str | None:
    """Return a policy that finds at least so many missing keys and keeps those that were found."""
    unused = frozenset(free)
    fits: list[tuple[str, str, int]] = []
    for old, new in islice(_candidates(missing[0], free), _TRIED):
        below = [key for key in missing if has_prefix(key, old)]
        if len(below) < least or any(_moved(key, old, new) not in unused for key in below):
            continue
        if all(_moved(key, old, new) in stored for key in used if has_prefix(key, old)):
            fits.append((old, new, len(below)))
    if fits:
        return _finding(_best(fits), len(missing))
    for part in missing[0].split(".")[:-1]:
        if all(key.replace(f"{part}.", "") in unused for key in missing):
            return _finding([(f"lambda key: key.replace({f'{part}.'!r}, '')", len(missing))], len(missing))
    return None


def _best(fits: Sequence[tuple[str, str, int]]) -> list[tuple[str, int]]:
    """Return the renamings that change least: those to a copy of the keys, such as an average, fit as well."""
    fits = [fit for fit in fits if fit[0] == fits[0][0]]
    least = min(_change(old, new) for old, new, _ in fits)
    return [(f"{{{old!r}: {new!r}}}", count) for old, new, count in fits if _change(old, new) == least]


def _change(old: str, new: str) -> int:
    """Return how many parts of two prefixes only one of them has.

    Examples
    --------
    >>> _change("model.module", "model"), _change("model.module", "ema")
    (1, 3)
    """
    parts, others = Counter(old.split(".")), Counter(new.split("."))
    return ((parts - others) + (others - parts)).total()


def _finding(renames: Sequence[tuple[str, int]], total: int) -> str:
    (rename, count), *others = renames
    text = f"Pass LoadPolicy(rename={rename}), which finds {'every key' if count == total else f'{count} of them'}"
    return f"{text}; so does {' or '.join(other for other, _ in others[:_NAMED])}" if others else text


def _candidates(key: str, free: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of prefixes that turn `key` into a stored key, those that change least first."""
    parts = key.split(".")
    for cut in range(len(parts)):
        rest = ".".join(parts[cut:])
        for name in free:
            if name != key and (name == rest or name.endswith(f".{rest}")):
                yield ".".join(parts[:cut]), name[: -len(rest)].rstrip(".")


def _moved(key: str, old: str, new: str) -> str:
    rest = key[len(old) :].strip(".")
    return ".".join(part for part in (new, rest) if part)
