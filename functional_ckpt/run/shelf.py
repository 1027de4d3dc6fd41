"""`Shelf`: the steps below a directory that one process knows, and their removal in a thread."""

import os
import threading
from collections.abc import Iterable, Sequence

import attrs

from functional_ckpt.errors import CheckpointError, NotACheckpointError
from functional_ckpt.plan.retention import Keep, StepInfo, needs_metrics, steps_to_remove
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.steps import find_steps, is_pinned, pin_step, read_step, remove_step, step_path, unpin_step

__all__ = ["Shelf"]


class Shelf:
    """The steps below a directory that this process knows, with their cached facts.

    Examples
    --------
    >>> import functional_ckpt
    >>> _ = functional_ckpt.save({"step": 3}, step_path("memory://shelf-example", 3))
    >>> shelf = Shelf("memory://shelf-example", None)
    >>> shelf.look()
    >>> shelf.steps
    (3,)
    """

    def __init__(self, root: str | os.PathLike[str], keep: Keep | None) -> None:
        self.root, self.keep = root, keep
        self.access = StorePolicy()
        self._infos: dict[int, StepInfo] = {}
        self._being_removed: dict[int, None] = {}
        self._failed: dict[int, None] = {}  # steps that could not be removed
        self._problems: list[str] = []
        self._thread: threading.Thread | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps, ascending."""
        return tuple(self._infos)

    def look(self) -> None:
        """List the steps in storage; read metrics that `keep` needs and that are not known yet."""
        reads = needs_metrics(self.keep)
        # Before the listing: a removal that ends meanwhile is of a step that is listed.
        going = tuple(self._being_removed)
        found = {step: pinned for step, pinned in find_steps(self.root, self.access).items() if step not in going}
        infos = {step: (self._known(step, reads), pinned) for step, pinned in found.items()}
        self._infos = {s: i if i.pinned == p else attrs.evolve(i, pinned=p) for s, (i, p) in infos.items()}

    def _known(self, step: int, reads: bool) -> StepInfo:
        known = self._infos.get(step)
        if known is not None or not reads:
            return known or self._bare(step)
        try:
            return read_step(self.root, step, self.access)
        except CheckpointError as error:
            self._failure(step, error)
            return self._bare(step)

    def _bare(self, step: int) -> StepInfo:
        return StepInfo(step, step_path(self.root, step))

    def replace_steps(self, steps: Iterable[int]) -> None:
        """Replace the list of steps by that of another rank."""
        self._infos = {step: self._infos.get(step) or self._bare(step) for step in steps}

    def add(self, info: StepInfo) -> None:
        """Add a step that was committed."""
        is_latest = info.step >= next(reversed(self._infos), info.step)
        self._infos[info.step] = info
        self._failed.pop(info.step, None)
        if not is_latest:
            self._infos = dict(sorted(self._infos.items()))

    def prune(self) -> None:
        """Drop the steps that the rules do not keep; a thread removes their files, in order."""
        infos = [info for step, info in self._infos.items() if step not in self._failed]
        gone: list[int] = []
        for step in steps_to_remove(infos, self.keep):
            if is_pinned(self.root, step, self.access):  # by another process, since `look`
                self._infos[step] = attrs.evolve(self._infos[step], pinned=True)
            else:
                gone.append(step)
        if not gone:
            return
        self.join()
        thread = threading.Thread(target=self._remove_all, args=(gone,), name="functional_ckpt-remove")
        try:
            for step in gone:
                del self._infos[step]
                self._being_removed[step] = None
            thread.start()
        except RuntimeError:  # no thread can be had, at exit or at the system's limit
            self._remove_all(gone)
        except BaseException:  # an interrupt: what the thread does not remove, if there is one, is listed again
            for step in gone:
                self._being_removed.pop(step, None)
            raise
        else:
            self._thread = thread

    def _remove_all(self, steps: Sequence[int]) -> None:
        for step in steps:
            try:
                remove_step(self.root, step, self.access)
            except NotACheckpointError:  # another process was faster
                pass
            except CheckpointError as error:
                self._failure(step, error)
            finally:
                self._being_removed.pop(step, None)

    def _failure(self, step: int, error: CheckpointError) -> None:
        self._failed[step] = None
        self._problems.append(f"step {step} was not removed: {error}")

    def remove(self, step: int) -> None:
        """Remove a step now; raises what `remove_step` does."""
        self.join()
        remove_step(self.root, step, self.access)
        self._infos.pop(step, None)

    def pin(self, step: int, pinned: bool) -> None:
        """Pin or unpin a step; one that is just being removed is gone."""
        self.join()
        (pin_step if pinned else unpin_step)(self.root, step, self.access)
        if step in self._infos:
            self._infos[step] = attrs.evolve(self._infos[step], pinned=pinned)

    def join(self) -> None:
        """Wait for the removals."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def take_problems(self) -> tuple[str, ...]:
        """Return as text which steps could not be read or removed, once."""
        found, self._problems = self._problems, []
        return tuple(found)
