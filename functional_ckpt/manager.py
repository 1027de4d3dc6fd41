"""`Checkpoints`: the checkpoints of a run, one per step below one directory, and which of them stay."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from functional_ckpt import api
from functional_ckpt.errors import (
    CheckpointError,
    NotACheckpointError,
    PolicyError,
)
from functional_ckpt.plan.field import refuse
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.plan.retention import (
    Keep,
    Mode,
    StepInfo,
    best_of,
)
from functional_ckpt.run.arguments import check_policy
from functional_ckpt.run.comm import Gather, together
from functional_ckpt.run.keeper import Flight, Keeper, whole_step
from functional_ckpt.run.pending import PendingSave
from functional_ckpt.run.policy import LoadPolicy, SavePolicy
from functional_ckpt.run.progress import Progress
from functional_ckpt.run.stop import StopSignals
from functional_ckpt.store.opening import directory_of
from functional_ckpt.store.steps import check_root, read_step, step_path, sweep_steps

__all__ = ["Checkpoints"]

_LOGGER = logging.getLogger("functional_ckpt")


class Checkpoints:
    """The checkpoints of a run below `root`, each under ``step-00000010``; all ranks make and call it together.

    Only committed steps are listed. `steps`, `latest`, `best` and `info` do not communicate: on several ranks they
    return what rank 0 saw in the last call of any other method, so that every rank gets the same answer.

    Parameters
    ----------
    root
        Directory or URL; it is made by the first save. Files of others in it are left alone.
    keep
        Which steps to keep: `KeepLast`, `KeepEvery`, `KeepBest`, or several joined by ``|``. The others are removed
        when a later step is committed; the latest step and pinned steps are never removed. None keeps all.
    policy, load_policy
        Of the saves and loads. `SavePolicy.in_flight` is ``"wait"`` or ``"refuse"``: one save is in flight at a time.
        `SavePolicy.store` says how an object store is listed, pinned, swept and removed from, too.
    process_group
        As for `save`.
    on_signal
        Signals, such as ``(signal.SIGTERM,)``, that `should_stop` reports; they no longer end the process.

    Raises
    ------
    PolicyError
        For an argument that is not allowed, or a `root` that is itself a checkpoint.

    Examples
    --------
    >>> import numpy as np
    >>> state = {"w": np.zeros(2), "step": 0}
    >>> with Checkpoints("memory://manager-example") as checkpoints:
    ...     state = checkpoints.resume(state)
    ...     for state["step"] in range(state["step"] + 1, 4):
    ...         state["w"] += 1
    ...         _ = checkpoints.save(state["step"], state, metrics={"loss": 1 / state["step"]})
    >>> checkpoints.steps(), checkpoints.best("loss")
    ((1, 2, 3), 3)
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep: Keep | None = None,
        policy: SavePolicy = SavePolicy(),
        load_policy: LoadPolicy = LoadPolicy(),
        process_group: Any = None,
        on_signal: Iterable[int] = (),
    ) -> None:
        self.root = str(directory_of(root) or root)  # the program may go to another directory
        self.keep, self.policy, self.load_policy = keep, policy, load_policy
        self._process_group = process_group
        self._signals: StopSignals | None = None
        self._keeper = Keeper(self.root, keep, self._gather)
        try:
            self._keeper.meet("making", lambda: self._open(on_signal))
        except BaseException:
            self._restore()
            raise

    def _open(self, on_signal: Iterable[int]) -> None:
        check_policy("Checkpoints", self.policy, SavePolicy)
        check_policy("Checkpoints", self.load_policy, LoadPolicy)
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise refuse(self, "keep", "KeepLast, KeepEvery, KeepBest, or several joined by |", self.keep)
        if self.policy.in_flight == "queue":
            raise PolicyError(
                "Checkpoints has one save in flight at a time",
                expected="in_flight='wait' or 'refuse'",
                found="'queue'",
                remedy="Pass another SavePolicy",
            )
        self._signals = StopSignals(on_signal)
        self._keeper.shelf.access = self.policy.store  # only now: it was checked on all ranks
        if self._keeper.rank == 0:
            check_root(self.root, self.policy.store)
            sweep_steps(self.root, self.policy.store)
            self._keeper.shelf.look()

    # ---- Save and load -----------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        attributes: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> Manifest:
        """Save a step, then remove the steps that `keep` does not keep. Arguments as for `functional_ckpt.save`.

        `metrics` are numbers by name. Those of rank 0 are stored with the step, and read by `best`, `KeepBest` and
        `info`.

        Raises
        ------
        CheckpointError
            On every rank, if this save fails. Or before it begins, if an earlier `async_save` has failed and its result
            was not asked for.
        """
        info, own = self._keeper.begin("save", step, metrics, attributes, False)
        manifest = api.save(
            state,
            info.path,
            policy=self.policy,
            process_group=self._process_group,
            overwrite=overwrite,
            attributes=own,
            progress=progress,
        )
        self._keeper.meet("the end of a save", lambda: self._keeper.committed(info, manifest))
        return manifest

    def async_save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        attributes: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> PendingSave:
        """Save a step in the background; arguments as for `save`.

        The next call that all ranks make together lists the step and removes others. If the save has failed, that call
        raises the error, unless the result was asked for.

        Raises
        ------
        CheckpointError
            As `save`; `SaveInFlightError` if one is running and the policy says to refuse.
        """
        refuses = self.policy.in_flight == "refuse"
        info, own = self._keeper.begin("async_save", step, metrics, attributes, refuses)
        pending = api.async_save(
            state,
            info.path,
            policy=self.policy,
            process_group=self._process_group,
            overwrite=overwrite,
            attributes=own,
            progress=progress,
        )
        self._keeper.flight = Flight(info, pending)
        return pending

    def load(
        self,
        like: Any,
        step: int | None = None,
        *,
        policy: LoadPolicy | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Any:
        """Load a step, the latest by default, into a tree shaped as `like`; see `functional_ckpt.load`.

        Raises
        ------
        NotACheckpointError
            If there is no step, or not this one.
        CheckpointError
            On every rank.
        """
        chosen = self._keeper.choose("load", step)
        if chosen is None:
            raise NotACheckpointError(
                "there is no step to load",
                path=self.root,
                remedy="Use resume(like), which returns `like` if there is none",
            )
        return self._load(like, chosen, policy, progress)

    def resume(
        self,
        like: Any,
        *,
        policy: LoadPolicy | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Any:
        """Load the latest step into a tree shaped as `like`; where there is none, return `like` as it is.

        Raises
        ------
        CheckpointError
            On every rank.

        Examples
        --------
        >>> Checkpoints("memory://resume-example").resume({"step": 0})
        {'step': 0}
        """
        chosen = self._keeper.choose("resume", None)
        if chosen is None:
            _LOGGER.info("no step below %s: starting from the beginning", self.root)
            return like
        _LOGGER.info("resuming %s from step %d", self.root, chosen)
        return self._load(like, chosen, policy, progress)

    def _load(
        self, like: Any, step: int, policy: LoadPolicy | None, progress: Callable[[Progress], None] | None
    ) -> Any:
        policy = self.load_policy if policy is None else policy
        path = step_path(self.root, step)
        return api.load(like, path, policy=policy, process_group=self._process_group, progress=progress)

    # ---- What is there -------------------------------------------------------------------------------

    def steps(self) -> tuple[int, ...]:
        """Return the steps, ascending. A single process lists the storage at each call."""
        if self._keeper.size == 1:
            self._keeper.shelf.look()
        return self._keeper.shelf.steps

    def latest(self) -> int | None:
        """Return the latest step, None if there is none."""
        return max(self.steps(), default=None)

    def best(self, metric: str, mode: Mode = "min") -> int | None:
        """Return the step with the lowest (``"min"``) or highest (``"max"``) `metric`; None if no step has it.

        Raises
        ------
        CheckpointError
            If a step cannot be read on this rank.
        """
        return best_of([self.info(step) for step in self.steps()], metric, mode)

    def info(self, step: int) -> StepInfo:
        """Return time, bytes, metrics, attributes and whether it is pinned, as this rank reads them.

        Raises
        ------
        NotACheckpointError
            If there is no such step.
        """
        return read_step(self.root, whole_step("info", step), self.policy.store)

    def pin(self, step: int) -> None:
        """Keep a step whatever `keep` says, until `unpin`. The pin is stored below `root`.

        Raises
        ------
        NotACheckpointError
            On every rank, if there is no such step.
        """
        self._keeper.on_first("pin", lambda: self._keeper.shelf.pin(whole_step("pin", step), True))

    def unpin(self, step: int) -> None:
        """Remove the pin of a step: `keep` decides about it again."""
        self._keeper.on_first("unpin", lambda: self._keeper.shelf.pin(whole_step("unpin", step), False))

    def remove(self, step: int) -> None:
        """Remove a step, even the latest.

        Raises
        ------
        StorageError
            On every rank, if there is no such step, or it is pinned or holds files of others.
        """
        self._keeper.on_first("remove", lambda: self._keeper.shelf.remove(whole_step("remove", step)))

    def sweep(self) -> tuple[str, ...]:
        """Remove the leftovers of dead saves and removals below `root`; return their names, on rank 0."""
        found: list[str] = []
        self._keeper.on_first("sweep", lambda: found.extend(sweep_steps(self.root, self.policy.store)))
        return tuple(found)

    # ---- Beginning and end -----------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """Tell whether any rank got one of the signals; all ranks get the same answer at the same call."""
        signals = self._signals
        return any(together(self._gather("should_stop"), lambda: signals is not None and signals.seen))

    def wait(self) -> None:
        """Wait for the save in flight and for removals.

        Raises
        ------
        CheckpointError
            On every rank, if that save failed and its result was not asked for.
        """
        self._keeper.meet("wait", self._keeper.settle)
        self._keeper.shelf.join()
        self._keeper.meet("the end of removals", lambda: None)

    def close(self) -> None:
        """Wait as `wait` does, and restore the earlier signal handlers."""
        try:
            self.wait()
        finally:
            self._restore()

    def __enter__(self) -> "Checkpoints":
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception, which other ranks may not have, wait for this rank's save only."""
        if error is None:
            self.close()
            return
        try:
            if self._keeper.flight is not None:
                self._keeper.flight.pending.settle()
        except CheckpointError as failed:
            error.add_note(f"the save in flight has failed too: {failed}")
        finally:
            self._keeper.shelf.join()
            self._restore()

    def __repr__(self) -> str:
        """Return the root and the number of steps."""
        steps = self._keeper.shelf.steps
        return f"Checkpoints({self.root!r}: {len(steps)} steps, latest {max(steps, default=None)})"

    # ---- Below ---------------------------------------------------------------------------------------

    def _gather(self, what: str) -> Gather:
        return api.gather_of(self._process_group, self.policy, "manager", f"{what} ({api.named(self.root)})")

    def _restore(self) -> None:
        if self._signals is not None:
            self._signals.restore()
