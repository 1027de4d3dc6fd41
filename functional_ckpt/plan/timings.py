"""`Timings`: how long each phase of a save or load took on one rank."""

from collections.abc import Iterator, Mapping

import attrs

__all__ = ["Timings"]


@attrs.frozen(eq=False, repr=False)
class Timings(Mapping[str, float]):
    """Seconds per phase, in order of their beginning; together they are the whole time, `total_s`.

    Examples
    --------
    >>> timings = Timings((("plan", 0.25), ("write", 1.5)))
    >>> timings["write"], timings.total_s, timings
    (1.5, 1.75, Timings(plan 0.25 s, write 1.5 s))
    """

    phases: tuple[tuple[str, float], ...] = ()

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(seconds for _, seconds in self.phases)

    def __getitem__(self, phase: str) -> float:
        """Return the seconds of a phase."""
        return dict(self.phases)[phase]

    def __iter__(self) -> Iterator[str]:
        """Yield the phases."""
        return (phase for phase, _ in self.phases)

    def __len__(self) -> int:
        """Return the number of phases."""
        return len(self.phases)

    def __str__(self) -> str:
        """Return phases and seconds, in words."""
        return ", ".join(f"{phase} {seconds:.3g} s" for phase, seconds in self.phases)

    def __repr__(self) -> str:
        """Return phases and seconds."""
        return f"Timings({self})"
