"""`Keeper`: the steps of a run, and the one save in flight, on which all ranks agree."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from functional_ckpt.errors import SaveInFlightError, SpecError, report
from functional_ckpt.plan.field import as_int, refuse
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.plan.retention import STEP, Keep, StepInfo, metrics_of, step_attributes
from functional_ckpt.run.comm import Gather, together, turn_of
from functional_ckpt.run.pending import PendingSave
from functional_ckpt.run.shelf import Shelf
from functional_ckpt.store.steps import step_path

__all__ = ["Flight", "Keeper", "whole_step"]

T = TypeVar("T")


@attrs.frozen(eq=False)
class Flight:
    """A save in the background, and the entry of its step once it is published."""

    info: StepInfo
    pending: PendingSave


class Keeper:
    """The steps below `root`, as all ranks see them; `gather(what)` returns the group for the call `what`.

    Examples
    --------
    >>> from functional_ckpt.run.comm import LocalGather
    >>> keeper = Keeper("memory://keeper-example", None, lambda what: LocalGather())
    >>> keeper.meet("looking", keeper.shelf.look), keeper.choose("load", None)
    ([None], None)
    """

    def __init__(self, root: str, keep: Keep | None, gather: Callable[[str], Gather]) -> None:
        self.root, self._gather = root, gather
        self.shelf = Shelf(root, keep)
        self.flight: Flight | None = None
        first = gather("beginning")
        self.rank, self.size = first.rank, first.size

    def meet(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on all ranks, and take over the list of steps of rank 0."""
        gather = self._gather(what)
        with turn_of(gather):
            found = together(gather, lambda: (work(), () if gather.rank or gather.size == 1 else self.shelf.steps))
        if gather.rank:
            self.shelf.replace_steps(found[0][1])
        for problem in self.shelf.take_problems():
            report(problem)
        return [result for result, _ in found]

    def on_first(self, what: str, work: Callable[[], None]) -> None:
        """Run `work` on rank 0, after the save in flight."""

        def settled() -> None:
            self.settle()
            if self.rank == 0:
                work()

        self.meet(what, settled)

    def begin(
        self,
        what: str,
        step: int,
        metrics: Mapping[str, Any] | None,
        attributes: Any,
        refuses: bool,
    ) -> tuple[StepInfo, dict[str, Any]]:
        """Agree on the step to save and on rank 0's metrics, once no save is in flight; also return all attributes.

        With `refuses` a save in flight is an error.
        """

        def check() -> StepInfo:
            number = whole_step(what, step)
            named = metrics_of(step_attributes(number, metrics))
            if attributes is not None and (not isinstance(attributes, Mapping) or STEP in attributes):
                raise refuse(what, "attributes", f"a dict without {STEP!r}", attributes)
            if refuses:
                self._refuse_second()
            self.settle()
            return StepInfo(number, step_path(self.root, number), metrics=named)

        infos = self.meet(f"{what} of a step", check)
        self._require_one(what, [info.step for info in infos])
        info = attrs.evolve(infos[0], path=step_path(self.root, infos[0].step))  # mounts may differ
        return info, {**(attributes or {}), **step_attributes(info.step, info.metrics)}

    def _refuse_second(self) -> None:
        flight = self.flight
        if flight is not None and not flight.pending.done():
            raise SaveInFlightError(
                f"the save of step {flight.info.step} is still running",
                path=self.root,
                remedy="Call wait() first, or pass SavePolicy(in_flight='wait')",
            )

    def settle(self) -> None:
        """Wait for the save in flight, and raise its failure unless it was raised before."""
        if self.flight is None:
            return
        manifest, info = self.flight.pending.settle(), self.flight.info
        self.flight = None
        if manifest is not None:
            self.committed(info, manifest)

    def committed(self, info: StepInfo, manifest: Manifest) -> None:
        """Record a committed step; rank 0 then removes the steps that the rules do not keep."""
        self.shelf.add(attrs.evolve(info, time=time.time(), nbytes=manifest.nbytes))
        if self.rank == 0:
            self.shelf.prune()

    def choose(self, what: str, step: int | None) -> int | None:
        """Agree with all ranks on the step to load: rank 0 looks for the latest."""

        def look() -> tuple[int | None, int | None]:
            wanted = None if step is None else whole_step(what, step)
            self.settle()
            if self.rank == 0:
                self.shelf.look()
            return wanted, max(self.shelf.steps, default=None) if wanted is None else wanted

        answers = self.meet(what, look)
        self._require_one(what, [wanted for wanted, _ in answers])
        return answers[0][1]

    def _require_one(self, what: str, steps: list[Any]) -> None:
        if len(set(steps)) > 1:
            raise SpecError(
                f"the ranks {what} different steps",
                path=self.root,
                found=", ".join(map(str, steps)),
                remedy="Pass one step on all ranks",
            )


def whole_step(function: str, step: object) -> int:
    """Return `step` as an int; raise `PolicyError` if it cannot be the number of a step.

    Examples
    --------
    >>> whole_step("save", 3)
    3
    """
    number = as_int(step)
    if type(number) is not int or not 0 <= number < 2**62:
        raise refuse(function, "step", "a whole number from 0 on", step)
    return number
