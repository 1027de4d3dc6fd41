"""`install`: ``torch.distributed.checkpoint`` saves and loads with `ZarrStorageWriter` and `Reader` by default.

DCP has no registry of storages: `install` replaces the names by which it finds its own, and `undo` restores them.
"""

import os
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, format_utils
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from functional_ckpt.errors import SpecError
from functional_ckpt.run.arguments import check_policy
from functional_ckpt.run.policy import LoadPolicy, SavePolicy
from functional_ckpt.store.encoding import METADATA_FILE, ROOT
from functional_ckpt.store.opening import directory_of, local_path
from functional_ckpt.store.target import is_of_dcp
from functional_ckpt.torch.dcp.bridge import LoadPlan, Metadata, StorageReader, StorageWriter
from functional_ckpt.torch.dcp.planner import check_unused
from functional_ckpt.torch.dcp.storage_writer import ZarrStorageReader, ZarrStorageWriter

try:
    from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess
except ImportError:  # older versions save in threads only
    _AsyncCheckpointProcess = None  # type: ignore[assignment, misc]

__all__ = ["INSTALLED_SAVE_POLICY", "Installed", "install"]

#: The default policy of `install`: what programs expect that know DCP's own files.
INSTALLED_SAVE_POLICY = SavePolicy(object_codec="torch", foreign="keep", metadata_file=True)

_MODULES: tuple[ModuleType, ...] = (dcp, _storage_utils, format_utils)
# Of DCP's own writer, and about its files only.
_FILE_OPTIONS = frozenset(
    ["single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead", "cache_staged_state_dict",
     "_extensions", "serialization_format"]
)  # fmt: skip


class Installed:
    """The replacement of DCP's own storage, until `undo` or the end of the ``with`` block."""

    def __init__(self, writer: type[StorageWriter], reader: type[StorageReader]) -> None:
        self._classes = {"FileSystemWriter": writer, "FileSystemReader": reader}
        self._before: list[tuple[Any, str, Any]] = []
        self._after: list[tuple[Any, str, Any]] = []
        for module in _MODULES:
            for name, value in self._classes.items():
                self._replace(module, name, value)
        if _AsyncCheckpointProcess is not None:
            self._replace(_AsyncCheckpointProcess, "save", _with_writer(writer, _AsyncCheckpointProcess.save))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        self._after.append((owner, name, value))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore the replaced names; a name that a program has imported meanwhile keeps the replacement.

        Raises
        ------
        SpecError
            If another `install` followed and is not undone.
        """
        if any(getattr(owner, name) is not value for owner, name, value in self._after):
            raise SpecError("a later install is not undone yet", remedy="Undo the last one first")
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)
        self._before, self._after = [], []

    def __enter__(self) -> "Installed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def install(save_policy: SavePolicy = INSTALLED_SAVE_POLICY, load_policy: LoadPolicy = LoadPolicy()) -> Installed:
    """Let ``torch.distributed.checkpoint`` use the storage of this library for every path, in this process.

    It does where a program passes only ``checkpoint_id``, or makes a ``FileSystemWriter`` or ``FileSystemReader`` of
    ``torch.distributed.checkpoint``; also in the process that ``async_save`` may start, and in ``format_utils``. What
    DCP has saved in its own format is read as before. DCP itself handles URLs for which this library has no store.

    Parameters
    ----------
    save_policy
        See `SavePolicy`; by default objects are written with ``torch.save``, files of others at the path are kept, and
        there is a `.metadata` that programs look for. DCP overwrites, and so does this.
    load_policy
        See `ZarrStorageReader`; ``LoadPolicy(cast="same_kind")`` allows another data type than was saved, and
        ``LoadPolicy(safe_globals=[...])`` names classes of objects.

    Returns
    -------
    Installed
        Has `undo`; in a ``with`` statement it undoes itself.

    Raises
    ------
    PolicyError
        For a policy of another type, or one that says what to load: DCP decides that.

    Examples
    --------
    >>> import tempfile, torch, warnings, functional_ckpt
    >>> import torch.distributed.checkpoint as dcp
    >>> path = tempfile.mkdtemp()
    >>> with warnings.catch_warnings(), install():
    ...     warnings.simplefilter("ignore")
    ...     _ = dcp.save({"w": torch.ones(2)}, checkpoint_id=path)
    >>> functional_ckpt.open_checkpoint(path)["w"][:]
    array([1., 1.], dtype=float32)
    """
    check_policy("install", save_policy, SavePolicy)
    check_policy("install", load_policy, LoadPolicy)
    check_unused("install", load_policy)

    class Writer(ZarrStorageWriter):
        """The replacement of `FileSystemWriter`."""

        def __init__(self, path: str | os.PathLike[str], *files: Any, overwrite: bool = True, **options: Any) -> None:
            unknown = sorted(options.keys() - _FILE_OPTIONS)
            if unknown:
                raise TypeError(f"FileSystemWriter got an unexpected keyword argument {unknown[0]!r}")
            super().__init__(os.fspath(path), policy=save_policy, overwrite=overwrite)

        def __reduce__(self) -> Any:
            # `install` was not called in the process that `async_save` starts.
            return _plain_writer, (self.path, self.policy, self.overwrite, self.__getstate__())

    class Reader(_EitherReader):
        """The replacement of `FileSystemReader`."""

        def __init__(self, path: str | os.PathLike[str], *files: Any, **options: Any) -> None:
            super().__init__(os.fspath(path), policy=load_policy)

    # For isinstance checks of programs: objects of DCP's own classes must still pass.
    Writer.register(FileSystemWriter)
    Reader.register(FileSystemReader)
    return Installed(Writer, Reader)


def _plain_writer(path: str, policy: SavePolicy, overwrite: bool, state: dict[str, Any]) -> ZarrStorageWriter:
    writer = ZarrStorageWriter(path, policy=policy, overwrite=overwrite)
    writer.__dict__.update(state)
    return writer


def _with_writer(writer: type[StorageWriter], before: Any) -> Any:
    """Return `before`, which sends a save to the process of `async_save`, with `writer` as the default."""

    def save(process: Any, staged_state_dict: Any, **options: Any) -> Any:
        path = options.get("checkpoint_id")
        if options.get("storage_writer") is None and path is not None and writer.validate_checkpoint_id(path):
            options["storage_writer"] = writer(path)  # type: ignore[call-arg]
        return before(process, staged_state_dict, **options)

    return save


def _holds_dcps(path: str | Path) -> bool:
    """Tell whether the checkpoint at a path is one of DCP, with metadata in one file or in one per rank."""
    root = directory_of(path)
    if root is None:
        return False
    return is_of_dcp(root / METADATA_FILE) or ((root / "__0.metadata").is_file() and not (root / ROOT).exists())


class _EitherReader(ZarrStorageReader):
    """Reads a checkpoint of this library, or one of DCP with DCP's own reader, depending on the metadata."""

    _other: StorageReader | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        self._other = None
        super().reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._other = FileSystemReader(local_path(self.path)) if _holds_dcps(self.path) else None
        return self._other.read_metadata(*args, **kwargs) if self._other else super().read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._other:
            self._other.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        else:
            super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return self._other.prepare_local_plan(plan) if self._other else super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return self._other.prepare_global_plan(plans) if self._other else super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        return self._other.read_data(plan, planner) if self._other else super().read_data(plan, planner)
