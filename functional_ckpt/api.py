"""The front door: `save`, `async_save`, `load`, `diff`. Values in, values out; the work is done behind it."""

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
from functional_ckpt.run.saving import Prepared, abandoning, prepare_captured, stage, write

__all__ = ["async_save", "diff", "load", "save"]

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
        Directory (a path or ``file://``) or ``memory://`` URL of the checkpoint.
    process_group
        Ranks that save together: a torch process group, any `Gather`, or None for the default group if
        ``torch.distributed`` is initialised, else this process alone.
    overwrite
        Replace the checkpoint at `path`, atomically.
    base
        Announced: an earlier checkpoint whose unchanged chunks are referenced rather than written.
    attributes
        JSON values for the Zarr root, readable by every Zarr tool.
    progress
        Called from working threads with a `Progress`.

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
    gather = _gather(process_group, policy, "save", f"save of {named(path)}")
    with turn_of(gather):
        return write(_prepared(state, path, policy, gather, overwrite, attributes, check), Tracker(progress))


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

    Arguments as for `save`. Saves of one process run one after the other; while one runs the next waits here, so that
    no more than one copy is held, unless `SavePolicy.in_flight` says otherwise.

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
    gather = _gather(process_group, policy, "async_save", what)
    tracker = Tracker(progress)
    with turn_of(gather):
        prepared = _prepared(state, path, policy, gather, overwrite, attributes, check)
        with abandoning(prepared):
            once = prepared.site.save_id
            background = _gather(process_group, policy, "background", what, once)
            staged = stage(prepared, background, tracker)
        return start(lambda: _written(staged, tracker), tracker, lane_of(gather))


def load(
    like: Any,
    path: str | Path,
    *,
    policy: LoadPolicy = LoadPolicy(),
    process_group: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> Any:
    """Load a checkpoint into a tree shaped as `like`, under any layout.

    Leaves that hold memory (tensors, DTensors, numpy arrays) are filled in place and returned; meta tensors and
    specs are allocated; plain values are replaced by the stored ones.

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
    gather = _gather(process_group, policy, "load", f"load of {named(path)}")
    with turn_of(gather):
        return load_tree(like, path, policy, gather, progress)


def diff(a: str | Path, b: str | Path) -> Any:
    """Compare two checkpoints (announced).

    Raises
    ------
    NotImplementedYet
        Always, in this version.
    """
    raise NotImplementedYet("diff comes with a later release", found=f"{a}, {b}",
                            remedy="Compare the digests of read_manifest(a) and read_manifest(b)")  # fmt: skip


def _refuse_base(base: object) -> None:
    if base is not None:
        raise NotImplementedYet("incremental saves come with a later release", remedy="Leave base=None")


def named(path: object) -> str:
    """Return what a path is called, on whatever mount.

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
    """Agree with all ranks on a save, unless an earlier one has failed that nobody asks for.

    `check` raises for a wrong argument; it runs first, and where one rank's failure is told to all.
    """

    def describe() -> Captured:
        check()
        raise_dropped()
        return capture(state, gather, policy, overwrite, attributes)

    return prepare_captured(describe, path, policy, gather, overwrite, _PLANS)


def _written(staged: Prepared, tracker: Tracker) -> Manifest:
    with turn_of(staged.gather):
        return write(staged, tracker)


def _gather(
    process_group: Any, policy: SavePolicy | LoadPolicy, purpose: str, what: str, once: str | None = None
) -> Gather:
    if isinstance(process_group, Gather) and not _is_torch_group(process_group):
        return process_group
    if "torch" not in sys.modules:
        if process_group is not None:
            raise SpecError(
                "this is no process group",
                found=type(process_group).__name__,
                remedy="Pass a torch process group, or an object with rank, size, all_gather",
            )
        return LocalGather()
    group = importlib.import_module("functional_ckpt.torch.group.link")
    # Another rank's policy may be fine: what is no policy is refused once all ranks can hear of it.
    timeout_s = getattr(policy, "timeout_s", SavePolicy().timeout_s)
    return cast("Gather", group.torch_gather(process_group, timeout_s, purpose, what, once))


def _is_torch_group(value: object) -> bool:
    return type(value).__module__.startswith("torch.")
