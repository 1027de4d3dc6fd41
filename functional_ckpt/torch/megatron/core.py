"""``metadata.json``, which names the strategies that read a checkpoint. It is written last, after all other files."""

import json
import os
from pathlib import Path

import attrs

from functional_ckpt.errors import CorruptionError
from functional_ckpt.store.base import Store, storage_errors
from functional_ckpt.store.directories import sync_directory
from functional_ckpt.store.files import FileStore
from functional_ckpt.store.opening import open_store
from functional_ckpt.torch.megatron.sharded_base import CheckpointingException

__all__ = [
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "read_config",
    "save_config",
    "write_config",
    "write_whole",
]

CONFIG_FNAME = "metadata.json"


@attrs.frozen
class CheckpointingConfig:
    """The content of ``metadata.json``.

    Examples
    --------
    >>> CheckpointingConfig("functional_ckpt").common_backend
    'torch'
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """Tell whether a directory holds a finished checkpoint.

    Examples
    --------
    >>> import tempfile
    >>> check_is_distributed_checkpoint(tempfile.mkdtemp())
    False
    """
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """Return the content of ``metadata.json``, or None if there is none. Unknown fields are ignored.

    Raises
    ------
    CheckpointingException
        If it cannot be read.
    """
    return None if checkpoint_dir == "" else read_config(open_store(checkpoint_dir))


def read_config(store: Store) -> CheckpointingConfig | None:
    """Return what `maybe_load_config` does, for a store.

    Raises
    ------
    CheckpointingException
        If it cannot be read.
    """
    path = f"{store.url}/{CONFIG_FNAME}"
    if isinstance(store, FileStore) and not (store.root / CONFIG_FNAME).is_file():
        return None
    data = store.read(CONFIG_FNAME)
    if data is None:
        return None
    known = [field.name for field in attrs.fields(CheckpointingConfig)]
    try:
        found = json.loads(data)
        return CheckpointingConfig(**{name: found[name] for name in known if name in found})
    except (ValueError, TypeError) as error:
        raise CorruptionError("metadata.json is damaged", path=path, found=str(error)) from None


def save_config(config: CheckpointingConfig, checkpoint_dir: str | Path) -> None:
    """Write ``metadata.json`` atomically.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mkdtemp()
    >>> save_config(CheckpointingConfig("functional_ckpt"), path)
    >>> maybe_load_config(path).sharded_backend
    'functional_ckpt'
    """
    write_config(config, open_store(checkpoint_dir))


def write_config(config: CheckpointingConfig, store: Store) -> None:
    """Do what `save_config` does, for a store; where no file is replaced, there must be none."""
    data = json.dumps(attrs.asdict(config)).encode()
    if isinstance(store, FileStore):
        write_whole(store.root / CONFIG_FNAME, data)
    else:
        store.publish(CONFIG_FNAME, data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically and durably; it replaces an existing one.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a")
    >>> write_whole(path, b"1"), write_whole(path, b"2"), path.read_bytes()
    (None, None, b'2')
    """
    with storage_errors("writing", str(path)):
        new = path.with_name(f".{path.name}.new")
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
            os.fsync(file)
        finally:
            os.close(file)
        os.rename(new, path)
        sync_directory(path.parent)
