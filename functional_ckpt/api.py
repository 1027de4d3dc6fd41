"""The public functions `save`, `async_save`, `load` and `diff`."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from functional_ckpt.errors import NotImplementedYet, SpecError
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.run.arguments import check_save
from functional_ckpt.run.capture import Captured, capture
from functional_ckpt.run.comm import Gather, LocalGather, lane_of, turn_of
from functional_ckpt.run.loading import load_tree
from functional_ckpt.run.pending import PendingSave, raise_dropped, refuse_while_running, start, wait_for_all
from functional_ckpt.run.planning import PlanMemory
from functional_ckpt.run.policy import LoadPolicy, SavePolicy
from functional_ckpt.run.progress import Progress, Tracker
from functional_ckpt.run.saving import Prepared, abandoning, prepare_captured, write
from functional_ckpt.run.staging import stage, unstage
from functional_ckpt.run.timed import timed
from functional_ckpt.show.bar import displayed

__all__ = ["async_save", "diff", "gather_of", "load", "named", "save"]

_PLANS = PlanMemory()


def save(
    state: Any,
    path: str | Path,
    *,
    policy: SavePolicy = SavePolicy(),
    process_group: Any = None,
    overwrite: bool = False,
    base: str | Path | None = None,
    attributes: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Save a state: nested dicts and lists of tensors, arrays and plain values. All ranks call it together.

    Parameters
    ----------
    state
        What this rank holds. DTensors are sharded; plain tensors and values under one key on several ranks are
        copies; `PerRank` marks values that differ by rank. Keys are paths joined by dots.
    path
        Directory (a path or ``file://``), or ``memory://``, ``s3://`` or ``gs://`` URL. The same on all ranks.
    policy
        How to save: layout, durability, memory, what to do with objects; see `SavePolicy`.
    process_group
        Ranks that save together: a torch process group, any `Gather`, or None for the default group if
        ``torch.distributed`` is initialised, else this process alone.
    overwrite
        Replace the checkpoint at `path`, atomically.
    base
        Not implemented yet: an earlier checkpoint whose unchanged chunks are referenced rather than written.
    attributes
        JSON values for the Zarr root, readable by every Zarr tool.
    progress
        Called from working threads with a `Progress`, in place of the bar that rank 0 shows in a terminal.

    Returns
    -------
    Manifest
        What the checkpoint contains; its `timings` tell how long each phase took on this rank.

    Raises
    ------
    CheckpointError
        On every rank, with all problems at once. Nothing is published then, and what `path` held stays.

    Examples
    --------
    >>> import numpy as np
    >>> manifest = save({"model": {"w": np.ones((4, 2), "f4")}, "step": 3}, "memory://save-example")
    >>> [entry.spec.key for entry in manifest.arrays]
    ['model.w']
    """
    _refuse_base(base)

    def check() -> None:
        check_save("save", state, path, policy, overwrite, attributes, progress)

    wait_for_all()
    tracker = Tracker(progress)
    gather = timed(gather_of(process_group, policy, "save", f"save of {named(path)}"), tracker)
    shown = displayed(f"saving {named(path)}", tracker.count, gather.rank == 0, progress is None)
    with shown, turn_of(gather):
        return write(_prepared(state, path, policy, gather, overwrite, attributes, check), tracker)


def async_save(
    state: Any,
    path: str | Path,
    *,
    policy: SavePolicy = SavePolicy(),
    process_group: Any = None,
    overwrite: bool = False,
    base: str | Path | None = None,
    attributes: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> PendingSave:
    """Save in the background; returns when the state may be changed again, that is when it is copied to the host.

    Saves of one process run one after the other. While one runs, the next waits here, so that no more than one copy is
    held, unless `SavePolicy.in_flight` says otherwise.

    Parameters
    ----------
    state, path, policy, process_group, overwrite, base, attributes, progress
        As for `save`.

    Returns
    -------
    PendingSave
        Its ``result()`` waits for the save and raises its error. The save is published without that call, too.

    Raises
    ------
    CheckpointError
        On every rank, for problems found before the copy; later ones are raised by `PendingSave.result`.

    Examples
    --------
    >>> import numpy as np
    >>> async_save({"w": np.ones(2)}, "memory://async-example").result().nbytes
    16
    """
    _refuse_base(base)

    def check() -> None:
        check_save("async_save", state, path, policy, overwrite, attributes, progress)
        if policy.in_flight == "refuse":
            refuse_while_running()

    if getattr(policy, "in_flight", "wait") == "wait":  # what is no policy is refused once all ranks can hear of it
        wait_for_all()
    what = f"async_save of {named(path)}"
    tracker = Tracker(progress)
    gather = timed(gather_of(process_group, policy, "async_save", what), tracker)
    with turn_of(gather):
        prepared = _prepared(state, path, policy, gather, overwrite, attributes, check)
        with abandoning(prepared):
            once = prepared.site.save_id
            background = timed(gather_of(process_group, policy, "background", what, once), tracker)
            staged = stage(prepared, background, tracker)
        tracker.time("wait")  # for its turn
        return start(lambda: _written(staged, tracker, named(path)), tracker, lane_of(gather))


def load(
    like: Any,
    path: str | Path,
    *,
    policy: LoadPolicy = LoadPolicy(),
    process_group: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> Any:
    """Load a checkpoint into a tree shaped as `like`, under any layout.

    All ranks call it together.

    Parameters
    ----------
    like
        What this rank wants, as a tree of dicts and lists. Leaves that hold memory (tensors, DTensors, numpy arrays,
        `LocalShards`) are filled in place and returned. Meta tensors and specs are allocated. Plain values are replaced
        by the stored ones, also where `like` holds None.
    path
        Directory (a path or ``file://``), or ``memory://``, ``s3://``, ``gs://`` or ``http(s)://`` URL.
    policy
        Which keys to load and under which names, whether data types and shapes may change, what is checked, how
        values per rank are dealt; see `LoadPolicy`.
    process_group
        Ranks that load together, as for `save`. They need not be those that saved.
    progress
        Called from working threads with a `Progress`, in place of the bar that rank 0 shows in a terminal. The last
        one, of the phase ``"done"``, has the seconds of each phase.

    Returns
    -------
    Any
        A tree of the same form as `like`. Leaves that `policy` does not select are those of `like`.

    Raises
    ------
    CheckpointError
        On every rank, with all problems at once, before anything is changed; only corrupt bytes are found later.

    Examples
    --------
    >>> import numpy as np
    >>> _ = save({"w": np.arange(4), "step": 3}, "memory://load-example")
    >>> load({"w": np.zeros(4, int), "step": 0}, "memory://load-example")
    {'w': array([0, 1, 2, 3]), 'step': 3}
    """
    tracker = Tracker(progress)
    gather = timed(gather_of(process_group, policy, "load", f"load of {named(path)}"), tracker)
    shown = displayed(f"loading {named(path)}", tracker.count, gather.rank == 0, progress is None)
    with shown, turn_of(gather):
        return load_tree(like, path, policy, gather, tracker)


def diff(a: str | Path, b: str | Path) -> Any:
    """Compare two checkpoints (not implemented yet).

    Parameters
    ----------
    a, b
        Paths or URLs of two checkpoints.

    Raises
    ------
    NotImplementedYet
        Always, in this version.
    """
    raise NotImplementedYet(
        "diff comes with a later release",
        found=f"{a}, {b}",
        remedy="Compare the digests of read_manifest(a) and read_manifest(b)",
    )


def _refuse_base(base: object) -> None:
    if base is not None:
        raise NotImplementedYet("incremental saves come with a later release", remedy="Leave base=None")


def named(path: object) -> str:
    """Return the last component of a path, which is equal on ranks with different mount points.

    Examples
    --------
    >>> named("/data/run/step-100/")
    "'step-100'"
    """
    text = str(path) if isinstance(path, str | os.PathLike) else type(path).__name__  # a state is long
    return repr(text.rstrip("/").rpartition("/")[2])


def _prepared(
    state: Any,
    path: str | Path,
    policy: SavePolicy,
    gather: Gather,
    overwrite: bool,
    attributes: Mapping[str, Any] | None,
    check: Callable[[], None],
) -> Prepared:
    """Agree with all ranks on a save. Raise instead if an earlier save in the background failed and was not awaited.

    `check` raises for a wrong argument; it runs first, in the step in which the failure of one rank reaches all.
    """

    def describe() -> Captured:
        check()
        raise_dropped()
        return capture(state, gather, policy, overwrite, attributes)

    return prepare_captured(describe, path, policy, gather, overwrite, _PLANS)


def _written(staged: Prepared, tracker: Tracker, name: str) -> Manifest:
    # No bar: the program goes on meanwhile, and prints.
    with displayed(f"saving {name}", tracker.count, staged.gather.rank == 0, bar=False), turn_of(staged.gather):
        try:
            return write(staged, tracker)
        finally:
            unstage(staged)


def gather_of(
    process_group: Any, policy: SavePolicy | LoadPolicy, purpose: str, what: str, once: str | None = None
) -> Gather:
    """Return the group of ranks that makes a call together, see `save`; `what` names the call to ranks in another one.

    Raises
    ------
    SpecError
        For what is no group, or one that this process is not in.

    Examples
    --------
    >>> gather_of(None, SavePolicy(), "save", "an example").size
    1
    """
    if isinstance(process_group, Gather) and not _is_torch_group(process_group):
        return process_group
    if "torch" not in sys.modules:
        if process_group is not None:
            raise SpecError(
                "this is not a process group",
                found=type(process_group).__name__,
                remedy="Pass a torch process group, or an object with rank, size, all_gather",
            )
        return LocalGather()
    group = importlib.import_module("functional_ckpt.torch.group.link")
    # An argument that is not a policy is refused later, in a step in which the failure of one rank reaches all.
    timeout_s = getattr(policy, "timeout_s", SavePolicy().timeout_s)
    return cast("Gather", group.torch_gather(process_group, timeout_s, purpose, what, once))


def _is_torch_group(value: object) -> bool:
    return type(value).__module__.startswith("torch.")
