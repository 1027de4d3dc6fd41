"""The same calls to megatron-core and to us: equal where docs/megatron.md names no difference, and different there."""

import ast
import importlib
import inspect
import itertools
import pkgutil
import tempfile
import warnings

import pytest

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
    pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")
    from megatron.core.dist_checkpointing import mapping as theirs
    from megatron.core.dist_checkpointing.strategies import async_utils as their_async
    from megatron.core.dist_checkpointing.strategies import base as their_base
    from megatron.core.dist_checkpointing.strategies import checkpointable as their_checkpointable
    from megatron.core.dist_checkpointing.strategies import fully_parallel as their_parallel

from functional_ckpt.torch.megatron import mapping as ours  # noqa: E402
from functional_ckpt.torch.megatron.strategies import async_calls as our_async  # noqa: E402
from functional_ckpt.torch.megatron.strategies import base as our_base  # noqa: E402
from functional_ckpt.torch.megatron.strategies import checkpointable as our_checkpointable  # noqa: E402
from functional_ckpt.torch.megatron.strategies import fully_parallel as our_parallel  # noqa: E402
from functional_ckpt.torch.megatron.strategies import zarr as our_zarr  # noqa: E402

WRAPPERS = {theirs: their_checkpointable, ours: our_checkpointable}
FIELDS = [*inspect.signature(ours.ShardedTensor).parameters]
CLASSES = {
    "mapping": (theirs, ours, ["ShardedTensor", "ShardedObject", "ShardedTensorFactory", "LocalNonpersistentObject"]),
    "checkpointable": (
        their_checkpointable,
        our_checkpointable,
        ["CheckpointableShardedTensor", "LocalShardsContainer"],
    ),
    "base": (
        their_base,
        our_base,
        [name for name in our_base.__all__ if name.endswith(("Strategy", "Base")) and name[0].isupper()],
    ),
    "async": (their_async, our_async, ["AsyncRequest"]),
}


def members(cls):
    return {n: v for n, v in vars(cls).items() if not n.startswith("_") or n.startswith(("__create", "__get_t"))}


@pytest.mark.parametrize(
    ("their_class", "our_class"),
    [
        pytest.param(getattr(them, name), getattr(us, name), id=name)
        for them, us, names in CLASSES.values()
        for name in names
    ],
)
def test_classes_have_all_members_with_their_parameters(their_class, our_class):
    found = members(our_class)
    for name, wanted in members(their_class).items():
        if name not in found:
            assert getattr(our_class, name) is not None
            continue
        if inspect.isroutine(wanted):
            names = [[*inspect.signature(getattr(c, name)).parameters] for c in (their_class, our_class)]
            assert names[0] == names[1], name


OF_TORCH_DIST = "the writing and reading of .distcp files"
INNER = "a step of save or load, whose values here are others"
NESTS = "works on any nested dicts, and needs nothing of a checkpoint"
#: What Megatron has and we have not, by module, and why; with None the whole module.
LEFT_OUT = {
    "dict_utils": {None: NESTS},
    "exchange_utils": {None: INNER},
    "state_dict_utils": {None: INNER},
    "tensor_aware_state_dict": {None: "local checkpoints of another library"},
    "utils": {None: NESTS},
    "strategies.cached_metadata_filesystem_reader": {None: OF_TORCH_DIST},
    "strategies.filesystem_async": {None: OF_TORCH_DIST},
    "strategies.state_dict_saver": {None: OF_TORCH_DIST},
    "strategies.torch": {None: OF_TORCH_DIST},
    "strategies.common": {None: "the writing and reading of common.pt"},
    "strategies.async_utils": dict.fromkeys(
        ["AsyncCaller", "TemporalAsyncCaller", "PersistentAsyncCaller"], "a process that works; here it is a thread"
    ),
    "strategies.fully_parallel": {"distribute_main_replicas_with_precomputed_distribution": INNER},
    "strategies": {"register_default_common_strategies": "they register themselves"},
    "validation": dict.fromkeys(
        ["validate_integrity_and_strict_load", "verify_checkpoint_and_load_strategy", "adjust_non_strict_load",
         "maybe_report_missing_and_unexpected_keys", "determine_global_metadata", "validate_sharded_objects_handling"],
        INNER,
    ),
}  # fmt: skip


def public(module):
    """Return the names that a module defines for others; a package also those that it hands on."""
    source = inspect.getsource(module)
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom) and hasattr(module, "__path__"):
            names |= {alias.name for alias in node.names}
    return {name for name in names if not name.startswith("_") and name not in ("logger", "T")}


def counterparts():
    root = importlib.import_module("megatron.core.dist_checkpointing")
    names = [
        "",
        *(m.name.removeprefix(root.__name__) for m in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")),
    ]
    return [name.removeprefix(".") for name in names]


@pytest.mark.parametrize("name", counterparts())
def test_every_public_name_is_here_or_left_out_for_a_reason(name):
    left_out = LEFT_OUT.get(name, {})
    if None in left_out:
        assert importlib.util.find_spec(f"functional_ckpt.torch.megatron.{name}") is None, "there is one now"
        return
    wanted = public(importlib.import_module(f"megatron.core.dist_checkpointing.{name}".rstrip(".")))
    here = importlib.import_module(f"functional_ckpt.torch.megatron.{name}".rstrip("."))
    missing = {each for each in wanted if not hasattr(here, each)}
    assert missing == {*left_out}


def test_a_wrapper_has_the_attributes_of_megatrons():
    for kind in ("Save", "Load"):
        them, us = (getattr(m, f"FullyParallel{kind}StrategyWrapper") for m in (their_parallel, our_parallel))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs_made = them(getattr(our_zarr, f"Zarr{kind}ShardedStrategy")(), object())
        ours_made = us(getattr(our_zarr, f"Zarr{kind}ShardedStrategy")())
        missing = {*vars(theirs_made)} - {*vars(ours_made)}
        assert missing <= {"cached_distribution", "cached_global_metadata"} if kind == "Load" else not missing


@pytest.mark.parametrize("function", ["is_main_replica", "apply_factories", "apply_factory_merges"])
def test_functions_have_their_parameters(function):
    assert [*inspect.signature(getattr(theirs, function)).parameters] == [
        *inspect.signature(getattr(ours, function)).parameters
    ]


def facts(shard):
    return {name: getattr(shard, name) for name in FIELDS if name != "data"}


def grids():
    """Yield a local tensor, rank offsets and a number of prepended axes."""
    for local, prepended in itertools.product([(), (3,), (2, 4), (2, 1, 3)], [0, 1, 2]):
        ndim = len(local) + prepended
        for counts in itertools.product([1, 3], repeat=ndim):
            offsets = [(axis, count - 1, count) for axis, count in enumerate(counts) if count > 1]
            yield torch.randn(local), offsets, prepended


@pytest.mark.parametrize(
    ("data", "offsets", "prepended"), [*grids()], ids=lambda value: str(getattr(value, "shape", value))
)
def test_shards_of_grids_are_equal(data, offsets, prepended):
    one, two = (
        m.ShardedTensor.from_rank_offsets("w", data, *offsets, replica_id=(0, 1), prepend_axis_num=prepended)
        for m in (theirs, ours)
    )
    assert facts(one) == facts(two)
    assert one.has_regular_grid == two.has_regular_grid
    for method in ("global_slice", "local_chunk_offset_in_global", "max_allowed_chunks"):
        assert getattr(one, method)() == getattr(two, method)(), method
    for dim in range(data.dim()):
        for start, length in ((0, 1), (data.shape[dim] - 1, 1), (0, data.shape[dim])):
            (a,), (b,) = (shard.narrow(dim, start, length) for shard in (one, two))
            assert facts(a) == facts(b)
            assert torch.equal(a.data, b.data)


@pytest.mark.parametrize("replica_id", [0, 1, (0, 0), (0, 1), (), [0], False])
def test_main_replicas_are_equal(replica_id):
    assert theirs.is_main_replica(replica_id) == ours.is_main_replica(replica_id)


@pytest.mark.parametrize("key", ["rng", "a_b", "a.b", ""])
def test_names_of_objects_are_equal(key):
    one, two = (m.ShardedObject(key, 1, (2, 3), (1, 0)) for m in (theirs, ours))
    assert one.unique_key == two.unique_key
    assert str(one) == str(two)
    again = ours.ShardedObject.empty_from_unique_key(one.unique_key)
    assert vars(again) == vars(theirs.ShardedObject.empty_from_unique_key(one.unique_key))


def state_of(module):
    def build(key, tensor, replica_id, flattened_range):
        return [module.ShardedTensor.from_rank_offsets(f"{key}.{i}", t) for i, t in enumerate(tensor.chunk(2))]

    def factory():
        return module.ShardedTensorFactory("w", torch.arange(4), build, torch.cat)

    return {"a": [factory(), 3], "b": {"c": factory()}, "t": (1,)}, {"a": {0: factory()}, "b": {"c": factory()}}


def test_factories_and_merges_are_equal():
    results = []
    for module in (theirs, ours):
        state, skeleton = state_of(module)
        module.apply_factories(state)
        places = [state["a"][0], state["b"]["c"]]
        results.append([[facts(shard) for shard in place] for place in places])
        state["a"][0], state["b"]["c"] = ([shard.data for shard in place] for place in places)
        done = module.apply_factory_merges(state, skeleton)
        assert done is state
        results[-1] += [done["a"][0].tolist(), done["b"]["c"].tolist(), done["a"][1], done["t"]]
    assert results[0] == results[1]


def test_write_items_are_equal():
    items = []
    for module, wrappers in ((theirs, their_checkpointable), (ours, our_checkpointable)):
        shards = [module.ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (0, i, 3)) for i in (2, 0)]
        values = [wrappers.CheckpointableShardedTensor.from_sh_ten(shard) for shard in shards]
        container = wrappers.LocalShardsContainer(values)
        found = container.__create_write_items__("w", container) + values[0].__create_write_items__("v", values[0])
        items.append([(i.type, i.index, i.index.index, i.tensor_data.chunk, i.tensor_data.size) for i in found])
        assert container.__create_chunk_list__() == [i.tensor_data.chunk for i in found[:2]]
    assert items[0] == items[1]


def test_requests_and_actions_are_equal():
    assert their_async.AsyncRequest._fields == our_async.AsyncRequest._fields
    assert their_async.AsyncRequest._field_defaults == our_async.AsyncRequest._field_defaults
    assert {a.name: a.value for a in their_base.StrategyAction} == {a.name: a.value for a in our_base.StrategyAction}


def plain(module, **changes):
    fields = {
        "key": "w", "data": None, "dtype": torch.float32, "local_shape": (2, 4), "global_shape": (6, 4),
        "global_offset": (2, 0), "axis_fragmentations": (3, 1),
    }  # fmt: skip
    return module.ShardedTensor(**{**fields, **changes})


def grid(module, *offsets, shape=(2, 4), **more):
    return module.ShardedTensor.from_rank_offsets("w", torch.ones(shape), *offsets, **more)


def merge_of_another_shape(module):
    factory = module.ShardedTensorFactory("w", torch.ones(4), lambda *_: {}, lambda loaded: loaded["a"])
    return module.apply_factory_merges({"x": {"a": torch.ones(2)}}, {"x": factory})


def wrapped(module, *shards):
    wrappers = WRAPPERS[module]
    return wrappers.LocalShardsContainer([wrappers.CheckpointableShardedTensor.from_sh_ten(shard) for shard in shards])


def saved_by_dcp(module, shard):
    value = WRAPPERS[module].CheckpointableShardedTensor.from_sh_ten(shard)
    with tempfile.TemporaryDirectory() as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.save({"w": value}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def applied_in_part(module):
    """Tell whether a factory that fails leaves those before it applied."""

    def fail(*_):
        raise KeyError("fail")

    good, bad = (module.ShardedTensorFactory("w", torch.ones(2), f, torch.cat) for f in (lambda *_: {}, fail))
    state = {"a": good, "b": bad}
    with pytest.raises(KeyError):
        module.apply_factories(state)
    return state["a"] is not good


def merged_in_part(module):
    """Tell whether a merge that fails leaves those before it merged."""
    factory = module.ShardedTensorFactory("w", None, None, lambda loaded: "merged")
    state = {"a": [1]}
    with pytest.raises(ValueError, match="b"):
        module.apply_factory_merges(state, {"a": factory, "b": factory})
    return state["a"] == "merged"


def test_values_that_differ():
    assert [applied_in_part(m) for m in (theirs, ours)] == [True, False]
    assert [merged_in_part(m) for m in (theirs, ours)] == [True, False]
    whole = [m.ShardedTensor.from_rank_offsets("w", torch.ones(2, dtype=torch.int64)) for m in (theirs, ours)]
    assert [wrapped(m, s).dtype for m, s in zip((theirs, ours), whole, strict=True)] == [torch.float32, torch.int64]


# What they do, or raise, and what we do or raise. A type is raised, anything else is done.
DIFFERENCES = {
    "a shard beyond its tensor": (lambda m: plain(m, global_offset=(6, 0)), "done", ours.CheckpointingException),
    "a negative offset": (lambda m: plain(m, global_offset=(-2, 0)), "done", ours.CheckpointingException),
    "too few fragmentations": (lambda m: plain(m, axis_fragmentations=(3,)), "done", ours.CheckpointingException),
    "no text as key": (lambda m: plain(m, key=7), "done", ours.CheckpointingException),
    "a repeated axis": (lambda m: grid(m, (0, 0, 2), (0, 1, 2)), "done", ours.CheckpointingException),
    "an axis out of range": (lambda m: grid(m, (2, 0, 2)), IndexError, IndexError),
    "a flattened range": (lambda m: plain(m, flattened_range=slice(1, 3)), theirs.CheckpointingException, "done"),
    "extent 0": (lambda m: grid(m, shape=(0, 4)).local_chunk_offset_in_global(), ZeroDivisionError, "done"),
    "fragments of no grid": (
        lambda m: plain(m, axis_fragmentations=None).max_allowed_chunks(), Exception, ours.CheckpointingException,
    ),
    "narrow out of range": (lambda m: grid(m).narrow(0, 1, 2), RuntimeError, RuntimeError),
    "narrow what does not divide": (
        lambda m: plain(m, data=torch.ones(2, 4), axis_fragmentations=None, global_offset=(3, 0)).narrow(0, 0, 1),
        AssertionError, AssertionError,
    ),
    "narrow without data": (lambda m: plain(m).narrow(0, 0, 1), AttributeError, "done"),
    "a slash in a name": (
        lambda m: m.ShardedObject.empty_from_unique_key("a/b/shard_0_1"), ValueError, "done",
    ),
    "no dimension in a name": (
        lambda m: m.ShardedObject.empty_from_unique_key(m.ShardedObject("a", 1, (), ()).unique_key), ValueError, "done",
    ),
    "no name of an object": (
        lambda m: m.ShardedObject.empty_from_unique_key("a/part_0_1"), AssertionError, AssertionError,
    ),
    "a float as extent": (
        lambda m: plain(m, local_shape=(2.0, 4)), "done", ours.CheckpointingException,
    ),
    "narrow from the end": (
        lambda m: grid(m, (0, 1, 3), (1, 1, 2), prepend_axis_num=1).narrow(-1, 0, 2), AssertionError, "done",
    ),
    "prepended axes under DCP": (
        lambda m: saved_by_dcp(m, grid(m, prepend_axis_num=1)), dcp.CheckpointException, "done",
    ),
    "a container of nothing": (wrapped, AssertionError, AssertionError),
    "a tensor that is not sharded": (lambda m: wrapped(m, torch.ones(2)), AssertionError, AssertionError),
    "shards that do not lie on a grid": (
        lambda m: plain(m, axis_fragmentations=None, global_offset=(3, 0)).local_chunk_offset_in_global(),
        AssertionError, AssertionError,
    ),
    "a rank offset out of range": (
        lambda m: grid(m, (0, 2, 2)), theirs.CheckpointingException, ours.CheckpointingException,
    ),
    "a flattened range in a grid": (lambda m: grid(m, flattened_range=slice(0, 1)), ValueError, ValueError),
    "a container of different tensors": (
        lambda m: wrapped(m, grid(m), m.ShardedTensor.from_rank_offsets("v", torch.ones(2, 4))),
        "done", ours.CheckpointingException,
    ),
    "a merge of another shape": (merge_of_another_shape, "done", ours.CheckpointingException),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_are_as_documented(name):
    call, *outcomes = DIFFERENCES[name]
    for module, outcome in zip((theirs, ours), outcomes, strict=True):
        if outcome == "done":
            call(module)
            continue
        with pytest.raises(outcome):
            call(module)
