"""Prefixes in policies: one that matches no key of any rank is an error, since it is probably misspelt."""

from collections.abc import Collection, Iterable, Sequence

import attrs

from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.mismatch import did_you_mean, quoted
from functional_ckpt.spec.tree import has_prefix

__all__ = ["Prefix", "check_prefixes", "prefixes_of", "prefixes_of_load"]

_NO_KEY = "has a prefix that matches no key"


@attrs.frozen
class Prefix:
    """A prefix in a field of a policy, whether it matches a key of this rank, and a hint what may have been meant.

    Without `text` it stands for the whole field: a function, or no prefix at all.
    """

    field: str
    text: str | None
    holds: bool
    hint: str | None = None


def prefixes_of(
    field: str, texts: Iterable[str], keys: Collection[str], stored: Collection[str] = ()
) -> tuple[Prefix, ...]:
    """Return the report of one rank on the prefixes in a field: `keys` are its own, `stored` those of the checkpoint.

    Examples
    --------
    >>> prefixes_of("LoadPolicy.keys", ["modle"], ["model.w"])[0].hint
    "Did you mean 'model'?"
    """
    return tuple(_prefix(field, text, keys, stored) for text in texts)


def prefixes_of_load(
    keys: object, rename: object, asked: Sequence[str], selects: bool, stored: Collection[str]
) -> tuple[Prefix, ...]:
    """Return the report of one rank on `keys` and `rename` of a `LoadPolicy`; `asked` are the keys of its `like`.

    Examples
    --------
    >>> prefixes_of_load(len, (("net", "model"),), ["net.w"], False, ["model.w"])[0].hint
    "`like` has 'net.w'"
    """
    reports: tuple[Prefix, ...] = ()
    if callable(keys) or keys == ():
        reports = (Prefix("LoadPolicy.keys", None, selects, f"`like` has {quoted(asked)}" if asked else None),)
    elif isinstance(keys, tuple):
        reports = prefixes_of("LoadPolicy.keys", keys, asked, stored)
    if isinstance(rename, tuple):
        reports += prefixes_of("LoadPolicy.rename", [new for new, _ in rename], asked, stored)
    return reports


def check_prefixes(reports: Iterable[Iterable[Prefix]]) -> list[PolicyError]:
    """Return a problem for each prefix that matches no key of any rank, from the reports of all ranks.

    Examples
    --------
    >>> here, there = Prefix("LoadPolicy.keys", "a", False), Prefix("LoadPolicy.keys", "a", True)
    >>> check_prefixes([[here], [there]])
    []
    >>> print(*check_prefixes([[here], [here]]))
    LoadPolicy.keys has a prefix that matches no key: key 'a'
    """
    found: dict[tuple[str, str | None], list[Prefix]] = {}
    for prefix in (prefix for each in reports for prefix in each):
        found.setdefault((prefix.field, prefix.text), []).append(prefix)
    return [
        PolicyError(f"{field} {'selects nothing' if text is None else _NO_KEY}", text, remedy=_hint(each))
        for (field, text), each in found.items()
        if not any(prefix.holds for prefix in each)
    ]


def _hint(reports: Sequence[Prefix]) -> str | None:
    return next((prefix.hint for prefix in reports if prefix.hint), None)


def _prefix(field: str, text: str, keys: Collection[str], stored: Collection[str]) -> Prefix:
    if any(has_prefix(key, text) for key in keys):
        return Prefix(field, text, True)
    if any(has_prefix(key, text) for key in stored):
        return Prefix(field, text, False, f"Stored keys have it, but {field} takes keys of `like`")
    if "*" in text:
        above = text.partition("*")[0].rpartition(".")[0]
        return Prefix(field, text, False, f"A prefix is not a pattern: pass {above!r} for all keys below it")
    stem = text.rstrip(".")
    depth = stem.count(".") + 1
    parts = {".".join(key.split(".")[:n]) for key in keys for n in range(1, depth + 2)}
    inner = min((part for part in parts if part.endswith(f".{stem}")), default=None)
    return Prefix(field, text, False, f"Did you mean {inner!r}?" if inner else did_you_mean(stem, parts))
