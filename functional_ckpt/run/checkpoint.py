"""`Checkpoint`: an open checkpoint as a mapping of lazy arrays, for inspection and for loading in one process."""

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import attrs
import numpy as np

from functional_ckpt.errors import CorruptionError, KeyMismatchError, ShapeError
from functional_ckpt.plan.field import is_word, refuse
from functional_ckpt.plan.load import plan_load
from functional_ckpt.plan.manifest import ArrayEntry, Manifest, RankItem
from functional_ckpt.plan.mismatch import did_you_mean, quoted
from functional_ckpt.plan.save import GIB
from functional_ckpt.run.objects import ObjectReader
from functional_ckpt.run.policy import LoadPolicy
from functional_ckpt.show.html import tree_html
from functional_ckpt.show.outline import outline_of
from functional_ckpt.show.text import count, size
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.spec.tree import DictKey, has_prefix, map_leaves, unflatten
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.buffer import HostBuffer
from functional_ckpt.store.chunk import check_chunks
from functional_ckpt.store.encoding import Array, numpy_dtype
from functional_ckpt.store.fill import read_plan
from functional_ckpt.store.reading import Opened
from functional_ckpt.store.values import decode_text, refuse_colliding

__all__ = ["Checkpoint", "StoredArray", "open_checkpoint"]

Framework: TypeAlias = Literal["numpy", "torch"]


@attrs.frozen(eq=False, repr=False)
class StoredArray:
    """A stored array; nothing is read before it is indexed.

    Examples
    --------
    >>> import functional_ckpt
    >>> _ = functional_ckpt.save({"w": np.arange(6.0).reshape(2, 3)}, "memory://stored-example")
    >>> functional_ckpt.open_checkpoint("memory://stored-example")["w"][1, ::2]
    array([3., 5.])
    """

    entry: ArrayEntry
    _opened: Opened

    def __repr__(self) -> str:
        """Return key, shape, data type and size."""
        chunks = count(self.entry.grid.size, "chunk")
        return f"StoredArray({self.key!r}, {self.shape}, {self.dtype}, {size(self.nbytes)} in {chunks})"

    @property
    def key(self) -> str:
        """Key that the array is stored under."""
        return self.entry.spec.key

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dimension, in elements."""
        return self.entry.spec.shape

    @property
    def dtype(self) -> str:
        """Zarr v3 name of the data type."""
        return self.entry.spec.dtype

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of one chunk, in elements."""
        return self.entry.layout.chunk

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, uncompressed."""
        return self.entry.spec.nbytes

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        """Return the extent of the first dimension."""
        if not self.shape:
            raise TypeError("a zero-dimensional array has no length")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the whole array, for ``numpy.asarray``."""
        return np.asarray(self[...], dtype)

    def __getitem__(self, index: Any) -> Any:
        """Return elements as numpy does for ints, slices with any step, and ``...``; reads the chunks touched only.

        Raises
        ------
        IndexError, ShapeError
            For an index outside the array, or of a kind that numpy would call fancy.
        CorruptionError
            If a chunk is missing, or one that is read whole differs from its digest.
        ReplacedError
            If the checkpoint was replaced or removed since it was opened.
        """
        box, rest = _basic_index(index, self.shape, self.key)
        with self._opened.guard():
            values = self._read(box)
        self._opened.check()
        return values[rest]

    def _read(self, box: Box) -> Array:
        store = self._opened.store
        for problem in check_chunks(store, ((self.entry, chunk) for chunk in self.entry.grid.touched(box))):
            raise problem
        try:
            values = np.empty(box.shape, numpy_dtype(self.dtype))
        except (MemoryError, ValueError) as error:
            raise CorruptionError(
                "an array does not fit into memory", self.key, shape=self.shape, found=str(error)
            ) from None
        spec = self.entry.spec
        read_plan(plan_load({spec.key: self.entry}, [ShardSpec(spec, box)]), [HostBuffer(values)], store, GIB)
        return values

    def torch(self) -> Any:
        """Return the whole array as a CPU tensor (needs torch)."""
        host_view = importlib.import_module("functional_ckpt.torch.host_view")
        return host_view.to_torch(self[...], self.dtype)


@attrs.frozen(eq=False, repr=False)
class Checkpoint(Mapping[str, StoredArray]):
    """An open checkpoint: key -> `StoredArray`; tied keys give the same array.

    Examples
    --------
    >>> import functional_ckpt
    >>> _ = functional_ckpt.save({"w": np.ones(2), "step": 7}, "memory://open-example", attributes={"run": "a"})
    >>> checkpoint = functional_ckpt.open_checkpoint("memory://open-example")
    >>> list(checkpoint), checkpoint.attributes["run"], checkpoint.state()["step"]
    (['w'], 'a', 7)
    """

    _opened: Opened

    def __repr__(self) -> str:
        """Return where it is, with counts and bytes."""
        return f"Checkpoint({self.url!r}, {outline_of(self.manifest).summary})"

    def _repr_html_(self) -> str | None:
        """Return the tree of keys, for a notebook."""
        return tree_html(self.url, outline_of(self.manifest))

    @property
    def manifest(self) -> Manifest:
        """The manifest."""
        return self._opened.manifest

    @property
    def url(self) -> str:
        """Where the checkpoint is."""
        return self._opened.store.url

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes that were passed to `save`."""
        return MappingProxyType(json.loads(self.manifest.attributes))

    def __getitem__(self, key: str) -> StoredArray:
        """Return the array under `key`."""
        entry = self.manifest.by_key.get(key)
        if entry is None:
            raise KeyMismatchError("the checkpoint has no such array", key, remedy=self._remedy(key))
        return StoredArray(entry, self._opened)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys of all arrays, sorted."""
        return iter(sorted(self.manifest.by_key))

    def __len__(self) -> int:
        """Return the number of arrays, tied keys included."""
        return len(self.manifest.by_key)

    def _remedy(self, key: str) -> str | None:
        if any(value.key == key for value in self.manifest.values):
            return "It is a plain value: look at state() or tree()"
        below = [name for name in self if has_prefix(name, key)]
        return f"Below it are {quoted(below)}" if below else did_you_mean(key, list(self))

    def tree(self) -> Any:
        """Return the nested state with plain values in place and arrays as `StoredArray`.

        Values that were saved as `PerRank` stand in a dict keyed by rank.
        """
        manifest, long = self.manifest, ObjectReader(self._opened.store, ())
        with self._opened.guard():
            leaves: list[tuple[Any, Any]] = [
                (_path(e.path, e.spec.key), long.read(e) if e.codec == "json" else self[e.spec.key])
                for e in manifest.arrays
            ]
        leaves += [(_path(alias.path, alias.key), self[alias.target]) for alias in manifest.aliases]
        leaves += [(_path(v.path, v.key), decode_text(v.key, v.text)) for v in manifest.values]
        try:
            refuse_colliding(item.value for path, _ in leaves for item in path if isinstance(item, DictKey))
            return unflatten((_by_rank(path), leaf) for path, leaf in leaves)
        except (ValueError, RecursionError) as error:
            raise CorruptionError(
                "the paths of the manifest do not form a tree", path=self.url, found=str(error)
            ) from None

    def state(self, framework: Framework = "numpy", safe_globals: Any = ()) -> Any:
        """Return the whole nested state, unsharded, as numpy arrays or (``framework="torch"``) CPU tensors.

        Tied leaves are one array. Objects are read under `safe_globals`, see `LoadPolicy`.

        Raises
        ------
        PolicyError
            For another framework, or what `LoadPolicy` refuses as `safe_globals`.
        """
        if not is_word(framework, *get_args(Framework)):
            raise refuse(self, "framework", "'numpy' or 'torch'", framework)
        made: dict[str, Any] = {}
        objects = ObjectReader(self._opened.store, LoadPolicy(safe_globals=safe_globals).safe_globals)

        def materialise(_path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, StoredArray):
                return leaf
            if leaf.key not in made:
                if leaf.entry.codec is not None:
                    with self._opened.guard():
                        made[leaf.key] = objects.read(leaf.entry)
                else:
                    made[leaf.key] = leaf.torch() if framework == "torch" else leaf[...]
            return made[leaf.key]

        try:
            state = map_leaves(materialise, self.tree())
        except RecursionError as error:
            raise CorruptionError("the state is nested too deeply", path=self.url, found=str(error)) from None
        if objects.problem is not None:
            raise objects.problem
        return state


def open_checkpoint(path: str | Path, *, store: StorePolicy = StorePolicy()) -> Checkpoint:
    """Open a committed checkpoint; reads its manifest only. `store` says how to reach an object store.

    On a file system its directory is kept open until the last reference to the result or its arrays is gone, so that a
    checkpoint which replaces it later is never read.

    Parameters
    ----------
    path
        A directory (path or ``file://``), or a ``memory://``, ``s3://``, ``gs://`` or ``http(s)://`` URL.
    store
        How to reach an object store.

    Raises
    ------
    NotACheckpointError, CorruptionError
        If there is no checkpoint, or its manifest is not the one that was committed.

    Examples
    --------
    >>> open_checkpoint("memory://no-such")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    functional_ckpt.errors.NotACheckpointError: no checkpoint here: path memory://no-such, ...
    """
    return Checkpoint(Opened.at(path, store))


def _path(path: tuple[Any, ...] | None, key: str) -> tuple[Any, ...]:
    return (key,) if path is None else path  # the empty path is that of a state which is one leaf


def _by_rank(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(DictKey(item.rank) if isinstance(item, RankItem) else item for item in path)


def _basic_index(index: Any, shape: tuple[int, ...], key: str) -> tuple[Box, tuple[Any, ...]]:
    """Return the smallest box that holds a basic index, and the index that picks from it."""
    items = list(index) if isinstance(index, tuple) else [index]
    open_ended = any(item is Ellipsis for item in items)
    if open_ended:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    items += [slice(None)] * (len(shape) - len(items))
    if len(items) != len(shape):
        raise IndexError(f"too many indices for {key!r} of shape {shape}")
    bounds = [_axis_bounds(item, axis, key, shape) for axis, item in enumerate(items)]
    box = Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))
    # As in numpy, `...` gives an array where plain ints would give a scalar.
    return box, (*(b[2] for b in bounds), *((...,) if open_ended else ()))


def _axis_bounds(item: Any, axis: int, key: str, shape: tuple[int, ...]) -> tuple[int, int, Any]:
    extent = shape[axis]
    if isinstance(item, slice):
        picked = range(extent)[item]
        if not len(picked):
            return 0, 0, slice(0, 0)
        low, high = min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1
        return low, high, slice(None, None, picked.step)
    try:
        if isinstance(item, bool):  # a mask to numpy, though Python takes it for an int
            raise TypeError
        at = range(extent)[item]
    except IndexError:
        raise IndexError(f"index {item} is out of range for axis {axis} of {key!r} with shape {shape}") from None
    except TypeError:
        raise ShapeError(
            "only ints, slices and ... index a stored array",
            key,
            shape=shape,
            found=repr(item),
            remedy="Read a slice and index the numpy array",
        ) from None
    return at, at + 1, 0
