"""What the tests share: equality of states, the problems of a failed call, arrays in pieces. Does not import torch."""

from collections import OrderedDict
from math import prod

import numpy as np
import pytest

from functional_ckpt import LocalShards, SavePolicy
from functional_ckpt.errors import CheckpointError, CheckpointErrors
from functional_ckpt.run.comm import GatherOnly
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.store.encoding import dtype_name, numpy_dtype
from functional_ckpt.testing.values import special_words

FAST = SavePolicy(durability="none")


def _bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def _same(one, other, path="state"):
    assert type(one) is type(other), f"{path}: {type(one)} became {type(other)}"
    if isinstance(one, dict):
        # Paths carry no order: what opens a checkpoint without `like` gives keys sorted.
        assert (list(one) == list(other)) if isinstance(one, OrderedDict) else one.keys() == other.keys(), path
        for key in one:
            _same(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            _same(a, b, f"{path}[{index}]")
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.shape, one.dtype.newbyteorder("=")) == (other.shape, other.dtype.newbyteorder("=")), path
        assert _bits(one.astype(one.dtype.newbyteorder("="))) == _bits(other.astype(other.dtype.newbyteorder("="))), (
            path
        )
    elif type(one).__module__.partition(".")[0] == "torch" and hasattr(one, "untyped_storage"):
        _same_tensor(one, other, path)
    elif hasattr(one, "value") and type(one).__name__ == "PerRank":
        _same(one.value, other.value, path)
    elif isinstance(one, set | frozenset):
        assert one == other, path
    else:
        assert repr(one) == repr(other), path


def _same_tensor(one, other, path):
    import torch

    assert (one.dtype, one.shape) == (other.dtype, other.shape), path
    one, other = (x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for x in (one, other))
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), path


@pytest.fixture(scope="session")
def same():
    """Assert that two states are equal: types, data types and every bit (NaN payloads, -0.0)."""
    return _same


@pytest.fixture(scope="session")
def fast():
    """A policy that does not wait for disks."""
    return FAST


@pytest.fixture(scope="session")
def problems_of():
    """Call a function that must fail with our errors; return all of its problems."""

    def problems(function, *arguments, **options):
        with pytest.raises(CheckpointError) as caught:
            function(*arguments, **options)
        error = caught.value
        return error.exceptions if isinstance(error, CheckpointErrors) else (error,)

    return problems


@pytest.fixture(scope="session")
def tree_bytes():
    """Return what lies under a directory: relative path -> bytes (None for a directory)."""

    def read(root):
        items = sorted(root.rglob("*"))
        return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in items}

    return read


@pytest.fixture(scope="session")
def gather_only():
    """Wrap a group so that it only gathers."""
    return GatherOnly


@pytest.fixture(scope="session")
def piece():
    """Return a leaf that holds `box` of a global array: shards without torch and its processes."""

    def make(array, box, replica_id=0):
        spec = ArraySpec("", array.shape, dtype_name(array.dtype, ""))
        return LocalShards(ShardSpec(spec, box, replica_id), array[box.slices])

    return make


@pytest.fixture(scope="session")
def plain_tree():
    """Return a small state of arrays and plain values, without torch."""

    def make(seed=0):
        random = np.random.default_rng(seed)
        return OrderedDict(
            model={"w": random.normal(size=(5, 3)).astype("f4"), "b": random.integers(0, 9, 3)},
            step=seed,
            lr=[0.1 * seed, None, (1, 2.5)],
        )

    return make


@pytest.fixture(scope="session")
def specials():
    """Return a numpy array of values that lossy code changes."""

    def make(dtype, shape=(3, 4)):
        kind, words = numpy_dtype(dtype), special_words(dtype)
        return np.resize(words, prod(shape) * kind.itemsize // words.itemsize).view(kind).reshape(shape)

    return make
