"""The keys that a load wants: which of them are stored, and which stored keys no rank wants."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import attrs

from functional_ckpt.errors import CheckpointError, KeyMismatchError, report
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.plan.mismatch import missing_problems, split_by_prefix, unexpected_problems
from functional_ckpt.plan.prefixes import Prefix, check_prefixes, prefixes_of_load
from functional_ckpt.plan.state import EMPTY_TEXTS
from functional_ckpt.run.policy import LoadPolicy
from functional_ckpt.spec.tree import has_prefix

__all__ = ["KeySummary", "WantedKeys"]


@attrs.frozen
class KeySummary:
    """What a rank sends to the others about its keys: stored keys that it uses, its empty containers, its prefixes."""

    used: tuple[str, ...]
    empty: tuple[str, ...]
    prefixes: tuple[Prefix, ...]


class WantedKeys:
    """Collects what the leaves of one rank's `like` ask for; `stored` are all keys of the checkpoint.

    Examples
    --------
    >>> wanted = WantedKeys(Manifest(()), LoadPolicy())
    >>> wanted.miss("w")
    >>> print(*wanted.problems([wanted.summary()]))  # doctest: +ELLIPSIS
    the checkpoint has no such key: key 'w'. Pass LoadPolicy(strict=...
    """

    def __init__(self, manifest: Manifest, policy: LoadPolicy) -> None:
        self.stored = [*manifest.by_key, *(value.key for value in manifest.values)]
        self._policy = policy
        self._by_rank = [entry.key for entry in manifest.per_rank]
        self._stored_empty = [value.key for value in manifest.values if value.text in EMPTY_TEXTS]
        self._used: dict[str, None] = {}
        self._asked: list[str] = []
        self._selects = False
        self._missing: list[str] = []
        self._empty: list[str] = []

    @cached_property
    def holders(self) -> frozenset[str]:
        """The keys of stored containers that are not empty, and of the root, from which all leaves may be removed."""
        parts = (key.split(".") for key in self.stored)
        return frozenset(["", *(".".join(each[:n]) for each in parts for n in range(len(each)))])

    def selects(self, key: str) -> bool:
        """Record a leaf, and tell whether it is to be loaded."""
        self._asked.append(key)
        selected = self._policy.selects(key)
        self._selects = self._selects or selected
        return selected

    def use_one(self, key: str) -> None:
        """Record that a stored key is used."""
        self._used[key] = None

    def use(self, keys: Iterable[str]) -> None:
        """Record that stored keys are used."""
        self._used.update(dict.fromkeys(keys))

    def use_below(self, key: str) -> None:
        """Record that all keys stored below `key` are used."""
        self.use(stored for stored in self.stored if has_prefix(stored, key))

    def miss(self, key: str) -> None:
        """Record a key that is not stored."""
        self._missing.append(key)

    def leave(self, key: str) -> None:
        """Record an empty container of `like` that is not empty in the checkpoint."""
        self._empty.append(key)

    def summary(self) -> KeySummary:
        """Return what to send to the other ranks."""
        # Missing keys below a container that is stored empty count as a use of the container.
        used = (*self._used, *split_by_prefix(self._missing, self._stored_empty)[0])
        keys, rename = self._policy.keys, self._policy.rename
        return KeySummary(
            used, tuple(self._empty), prefixes_of_load(keys, rename, self._asked, self._selects, self.stored)
        )

    def problems(self, summaries: Sequence[KeySummary]) -> list[CheckpointError]:
        """Return the problems with the keys of this rank and of all ranks; warn instead where the policy says so."""
        problems: list[CheckpointError] = list(check_prefixes(each.prefixes for each in summaries))
        stored, strict, renames = [*self.stored, *self._by_rank], self._policy.strict, self._policy.rename is not None
        missing = missing_problems(self._missing, self._used, stored, self._stored_empty, renames)
        problems += _acted(strict.missing, missing)
        # `keys` selects names in `like`; from `rename` alone the stored names of these cannot be found.
        if self._policy.keys is None or not renames:
            used = {key for each in summaries for key in each.used}
            extra = sorted(key for key in self.stored if key not in used and self._policy.selects(key))
            empty = [key for each in summaries for key in each.empty]
            problems += _acted(strict.unexpected, unexpected_problems(extra, empty, self._by_rank))
        return problems


def _acted(action: str, problems: Sequence[KeyMismatchError]) -> Sequence[KeyMismatchError]:
    """Return the problems that a policy says to raise; those to report become one warning."""
    if action == "raise":
        return problems
    if action == "report" and problems:
        report("; ".join(map(str, problems)))
    return ()
