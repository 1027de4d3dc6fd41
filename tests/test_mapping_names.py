"""Every name, field, default and signature of the three reference documents, as stubs, against ours.

A parameter without an annotation may have any; ``object`` in a return type stands for anything.
"""

import ast
import collections
import enum
import importlib
import inspect
import logging
import types
import typing
from abc import ABC
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from functional_ckpt import torch as torch_adapter  # noqa: E402
from functional_ckpt.torch.dcp.bridge import ChunkStorageMetadata, MetadataIndex, WriteItem  # noqa: E402
from functional_ckpt.torch.megatron import mapping  # noqa: E402
from functional_ckpt.torch.megatron.strategies import async_calls, base, checkpointable  # noqa: E402

MAPPING = """
class ShardedBase(ABC):
    key: str
    data: object
    replica_id: ReplicaId
    @abstractmethod
    def validate_metadata_integrity(self): ...
    @abstractmethod
    def without_data(self) -> ShardedBase: ...

class ShardedTensor(ShardedBase):
    key: str
    data: Optional[torch.Tensor]
    dtype: torch.dtype
    local_shape: Tuple[int, ...]
    global_shape: Tuple[int, ...]
    global_offset: Tuple[int, ...]
    axis_fragmentations: Optional[Tuple[int, ...]]
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: Optional[slice] = None
    def __post_init__(self): ...
    def validate_metadata_integrity(self) -> None: ...
    @property
    def has_regular_grid(self): ...
    def global_slice(self) -> Tuple[Union[int, slice], ...]: ...
    def local_chunk_offset_in_global(self) -> Tuple[int, ...]: ...
    def max_allowed_chunks(self) -> Tuple[int, ...]: ...
    def without_data(self): ...
    @classmethod
    def from_rank_offsets(cls, key: str, data: torch.Tensor, *rank_offsets: Tuple[int, int, int],
                          replica_id: ReplicaId = 0, prepend_axis_num: int = 0, flattened_range: None = None,
                          **init_kwargs): ...
    def init_data(self, device: Union[str, torch.device], init_fn=torch.empty): ...
    def narrow(self, dim: int, start: int, length: int) -> List[ShardedTensor]: ...

def is_main_replica(replica_id: ReplicaId): ...

class LocalNonpersistentObject:
    def __init__(self, obj): ...
    def unwrap(self): ...

class ShardedObject(ShardedBase):
    key: str
    data: object
    global_shape: Tuple[int, ...]
    global_offset: Tuple[int, ...]
    replica_id: ReplicaId = 0
    def __post_init__(self): ...
    def validate_metadata_integrity(self): ...
    def without_data(self): ...
    @property
    def unique_key(self): ...
    def __str__(self): ...
    @classmethod
    def empty_from_unique_key(cls, unique_key, replica_id: ReplicaId = 0): ...

class ShardedTensorFactory(ShardedBase):
    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: Optional[slice] = None
    def build(self): ...
    def validate_metadata_integrity(self): ...
    def without_data(self): ...

def apply_factories(sharded_state_dict: ShardedStateDict): ...
def apply_factory_merges(x1: StateDict, x2: ShardedStateDict, key: Tuple[str, ...] = ()) -> StateDict: ...
"""

CHECKPOINTABLE = """
class CheckpointableShardedTensor(torch.Tensor):
    def __new__(cls, data: torch.Tensor, sh_ten: ShardedTensor): ...
    def __create_write_items__(self, fqn: str, sh_ten: CheckpointableShardedTensor,
                               index: int = None) -> list[WriteItem]: ...
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]: ...
    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor: ...
    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor: ...
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None): ...
    def __repr__(self): ...

class LocalShardsContainer(torch.Tensor):
    def __new__(cls, local_shards: list[torch.Tensor]) -> LocalShardsContainer: ...
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None): ...
    def __create_write_items__(self, fqn: str, local_shards_cont: LocalShardsContainer) -> list[object]: ...
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]: ...
    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor: ...
    def __repr__(self): ...
"""

# remove_sharded_tensors and save_sharded_objects are called abstract there, but only raise: a strategy without them is
# complete.
BASE = """
class StrategyAction(Enum):
    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"

def get_default_strategy(action: StrategyAction, backend: str, version: int): ...
def register_default_strategy(action: StrategyAction, backend: str, version: int,
                              strategy: Union[SaveStrategyBase, LoadStrategyBase]): ...

class LoadStrategyBase(ABC):
    @abstractmethod
    def check_backend_compatibility(self, loaded_backend): ...
    @abstractmethod
    def check_version_compatibility(self, loaded_version): ...
    @property
    def can_handle_sharded_objects(self): ...

class SaveStrategyBase(ABC):
    def __init__(self, backend: str, version: int): ...
    @property
    def can_handle_sharded_objects(self): ...
    def __str__(self): ...

class LoadCommonStrategy(LoadStrategyBase):
    @abstractmethod
    def load_common(self, checkpoint_dir: Union[str, Path]): ...
    @abstractmethod
    def load_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict,
                             checkpoint_dir: Union[str, Path]): ...
    def load_sharded_metadata(self, checkpoint_dir: Union[str, Path]): ...

class LoadShardedStrategy(LoadStrategyBase):
    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Union[str, Path]): ...
    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: Union[str, Path]): ...
    def load_sharded_metadata(self, checkpoint_dir: Union[str, Path]): ...
    def remove_sharded_tensors(self, checkpoint_dir: Union[str, Path], key_prefix: str): ...

class SaveCommonStrategy(SaveStrategyBase):
    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: Union[str, Path]): ...
    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict,
                             checkpoint_dir: Union[str, Path]): ...

class SaveShardedStrategy(SaveStrategyBase):
    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Union[str, Path]): ...

class AsyncSaveShardedStrategy(SaveShardedStrategy):
    @abstractmethod
    def async_save(self, sharded_state_dict: ShardedStateDict,
                   checkpoint_dir: Union[str, Path]) -> AsyncRequest: ...
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Union[str, Path]): ...
"""

# Constructors of plain data: fields in the order of positional arguments.
DATACLASSES = {"ShardedTensor", "ShardedObject", "ShardedTensorFactory"}
WORDS = {
    **{name: getattr(mapping, name) for name in mapping.__all__},
    **{name: getattr(checkpointable, name) for name in checkpointable.__all__},
    **{name: getattr(base, name) for name in base.__all__},
    **{name: getattr(typing, name) for name in ("Any", "List", "Optional", "Tuple", "Union")},
    "AsyncRequest": async_calls.AsyncRequest,
    "ChunkStorageMetadata": ChunkStorageMetadata,
    "Enum": enum.Enum,
    "ABC": ABC,
    "MetadataIndex": MetadataIndex,
    "Path": Path,
    "WriteItem": WriteItem,
    "torch": torch,
}


def entries(module, stubs):
    """Return one test per class, field, method and function of the stubs."""
    for node in ast.parse(stubs).body:
        if isinstance(node, ast.FunctionDef):
            yield pytest.param(module, None, node, id=node.name)
            continue
        yield pytest.param(module, None, node, id=node.name)
        for member in node.body:
            name = getattr(member, "name", None) or getattr(getattr(member, "target", None), "id", None)
            yield pytest.param(module, node.name, member, id=f"{node.name}.{name or member.targets[0].id}")


def value_of(node):
    return eval(ast.unparse(node), dict(WORDS))


def shape(hint):
    """Return a type so that the old spelling (Tuple, Optional) equals the new one."""
    if isinstance(hint, str | typing.ForwardRef):
        hint = WORDS[getattr(hint, "__forward_arg__", hint)]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return frozenset(map(shape, args))
    if origin is not None:
        return origin, tuple(shape(a) if a is not Ellipsis and not isinstance(a, list) else str(a) for a in args)
    return type(None) if hint is None else hint


def same_type(found, wanted):
    if wanted in (object, (list, (object,))):
        return True
    return found == wanted


def check_function(ours, node):
    wanted = {name: facts for name, facts in parameters_of(node).items() if name not in ("self", "cls")}
    found = {n: p for n, p in inspect.signature(ours).parameters.items() if n not in ("self", "cls")}
    assert [*found] == [*wanted]
    hints = typing.get_type_hints(ours, localns=WORDS)
    for name, (kind, default, annotation) in wanted.items():
        assert found[name].kind is kind, name
        assert found[name].default == default, name
        if annotation is not None:
            hint = annotation if default is not None else typing.Optional[annotation]  # noqa: UP045 - None, strings
            assert shape(hints[name]) == shape(hint), name
    if node.returns is not None:
        assert same_type(shape(hints["return"]), shape(value_of(node.returns)))


def parameters_of(node):
    """Return name -> (kind, default, annotation) of a stub."""
    kinds = inspect.Parameter
    spec, names = node.args, {}
    defaults = [inspect.Parameter.empty] * (len(spec.args) - len(spec.defaults))
    defaults += [value_of(d) for d in spec.defaults]
    for argument, default in zip(spec.args, defaults, strict=True):
        names[argument.arg] = (kinds.POSITIONAL_OR_KEYWORD, default, argument.annotation)
    if spec.vararg:
        names[spec.vararg.arg] = (kinds.VAR_POSITIONAL, kinds.empty, spec.vararg.annotation)
    for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        names[argument.arg] = (kinds.KEYWORD_ONLY, value_of(default), argument.annotation)
    if spec.kwarg:
        names[spec.kwarg.arg] = (kinds.VAR_KEYWORD, kinds.empty, spec.kwarg.annotation)
    return {n: (k, d, a if a is None else value_of(a)) for n, (k, d, a) in names.items()}


def check_class(ours, node):
    assert [b.__name__ for b in ours.__bases__] == [ast.unparse(b).split(".")[-1] for b in node.bases] or ["object"]
    if node.name in DATACLASSES:
        fields = [m.target.id for m in node.body if isinstance(m, ast.AnnAssign)]
        assert list(inspect.signature(ours).parameters) == fields
        assert ours.__hash__ is None


def check_method(owner, node):
    marks = {ast.unparse(d) for d in node.decorator_list}
    ours = inspect.getattr_static(owner, node.name)
    assert isinstance(ours, property) is ("property" in marks)
    assert isinstance(ours, classmethod) is ("classmethod" in marks)
    if isinstance(ours, property):
        return
    function = getattr(ours, "__func__", ours)
    assert getattr(function, "__isabstractmethod__", False) is ("abstractmethod" in marks)
    check_function(function, node)


def check_field(owner, node):
    assert shape(typing.get_type_hints(owner)[node.target.id]) == shape(value_of(node.annotation))
    if owner.__name__ in DATACLASSES:
        default = inspect.Parameter.empty if node.value is None else value_of(node.value)
        assert inspect.signature(owner).parameters[node.target.id].default == default


ENTRIES = [*entries(mapping, MAPPING), *entries(checkpointable, CHECKPOINTABLE), *entries(base, BASE)]


@pytest.mark.parametrize(("module", "owner", "node"), ENTRIES)
def test_it_is_as_documented(module, owner, node):
    if isinstance(node, ast.ClassDef):
        check_class(getattr(module, node.name), node)
    elif owner is None:
        check_function(getattr(module, node.name), node)
    elif isinstance(node, ast.FunctionDef):
        check_method(getattr(module, owner), node)
    elif isinstance(node, ast.AnnAssign):
        check_field(getattr(module, owner), node)
    else:
        assert getattr(module, owner)[node.targets[0].id].value == value_of(node.value)


def test_the_table_is_read():
    assert len(ENTRIES) > 80


def test_data_of_mapping():
    assert isinstance(mapping.logger, logging.Logger)
    assert isinstance(mapping._logged_deprecations, dict)
    for name in ("StateDict", "CommonStateDict", "ShardedStateDict"):
        assert shape(getattr(mapping, name)) == (dict, (str, typing.Any))
    assert shape(mapping.ReplicaId) == frozenset([int, (tuple, (int, "Ellipsis"))])
    for name, count in (("FactoryBuildFn", 4), ("FactoryMergeFn", 1)):
        alias = getattr(mapping, name)
        assert typing.get_origin(alias) is collections.abc.Callable
        assert len(typing.get_args(alias)[0]) == count


def test_data_of_base():
    assert isinstance(base.default_strategies, collections.defaultdict)
    assert base.default_strategies.default_factory is dict
    assert isinstance(base.async_calls, async_calls.AsyncCallsQueue)


def test_the_data_of_a_shard_are_not_shown():
    shard = mapping.ShardedTensor.from_rank_offsets("w", torch.ones(3))
    assert repr(shard).startswith("ShardedTensor(key='w', dtype=torch.float32,")
    assert str(mapping.ShardedObject("rng", "secret", (1,), (0,))) == "ShardedObject(key='rng')"


SHORT = ["mapping", "serialization", "strategies.async_utils", "strategies.base", "strategies.checkpointable"]


def test_the_shorter_paths_are_these():
    folder = Path(torch_adapter.__file__).parent
    found = [folder / "mapping.py", folder / "serialization.py", *sorted((folder / "strategies").glob("[!_]*.py"))]
    assert [".".join(path.relative_to(folder).with_suffix("").parts) for path in found] == SHORT


@pytest.mark.parametrize("name", SHORT)
def test_a_shorter_path_has_every_public_name_of_the_module_it_stands_for(name):
    home = importlib.import_module(f"functional_ckpt.torch.megatron.{name}")
    short = importlib.import_module(f"functional_ckpt.torch.{name}")
    defined = {n for n, value in vars(home).items() if getattr(value, "__module__", None) == home.__name__}
    stubs = {"mapping": MAPPING, "strategies.base": BASE, "strategies.checkpointable": CHECKPOINTABLE}.get(name, "")
    documented = {n.name for n in ast.parse(stubs).body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    public = {n for n in {*home.__all__, *defined, *documented} if not n.startswith("_")}
    assert {n: getattr(short, n, None) for n in public} == {n: getattr(home, n) for n in public}
    assert public <= {*short.__all__} == {*home.__all__}
