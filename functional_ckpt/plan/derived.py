"""`Deriving`: an immutable value that keeps what others make of it: a remembered plan is compiled once."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import attrs

__all__ = ["Deriving"]

T = TypeVar("T")


class _Derived(dict[Hashable, Any]):
    """What is derived from one value; it does not go along when that is copied, or pickled for another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Derived, ()


@attrs.frozen
class Deriving:
    """Base of values that keep what is made of them; a value that `attrs.evolve` returns keeps nothing yet."""

    _derived: _Derived = attrs.field(factory=_Derived, init=False, eq=False, repr=False)

    def derived(self, make: Callable[..., T], *arguments: Hashable) -> T:
        """Return ``make(self, *arguments)``, which must depend on nothing else: it is called once for the arguments.

        Examples
        --------
        >>> @attrs.frozen
        ... class Word(Deriving):
        ...     text: str
        >>> word = Word("ab")
        >>> def repeated(word, times):
        ...     return [word.text] * times
        >>> word.derived(repeated, 2), word.derived(repeated, 2) is word.derived(repeated, 2)
        (['ab', 'ab'], True)
        """
        key = (make, *arguments)
        if key not in self._derived:
            self._derived[key] = make(self, *arguments)
        found: T = self._derived[key]
        return found
