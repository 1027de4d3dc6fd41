"""The names, parameters and defaults of Megatron's serialization, optimizer, core and wrappers, and ours."""

import inspect

import pytest

pytest.importorskip("torch")

from functional_ckpt.torch.megatron import core, optimizer, serialization
from functional_ckpt.torch.megatron.core import CheckpointingException
from functional_ckpt.torch.megatron.strategies import async_calls, async_utils, fully_parallel, zarr

NONE, REQUIRED = None, inspect.Parameter.empty
SIGNATURES = {
    serialization.save: {
        "sharded_state_dict": REQUIRED, "checkpoint_dir": REQUIRED, "sharded_strategy": NONE, "common_strategy": NONE,
        "validate_access_integrity": True, "async_sharded_save": False,
        "preprocess_common_before_consistancy_check": NONE, "content_metadata": NONE,
    },
    serialization.load: {
        "sharded_state_dict": REQUIRED, "checkpoint_dir": REQUIRED, "sharded_strategy": NONE, "common_strategy": NONE,
        "validate_access_integrity": True, "strict": serialization.StrictHandling.ASSUME_OK_UNEXPECTED,
    },
    serialization.load_common_state_dict: {"checkpoint_dir": REQUIRED},
    serialization.load_tensors_metadata: {"checkpoint_dir": REQUIRED, "sharded_strategy": NONE},
    serialization.load_sharded_metadata: {
        "checkpoint_dir": REQUIRED, "sharded_strategy": NONE, "common_strategy": NONE,
    },
    serialization.load_plain_tensors: {"checkpoint_dir": REQUIRED},
    serialization.load_content_metadata: {"checkpoint_dir": NONE, "preloaded_state_dict": NONE},
    serialization.remove_sharded_tensors: {"checkpoint_dir": REQUIRED, "key_prefix": REQUIRED},
    optimizer.get_optim_param_to_id_map: {"optim_params_iter": REQUIRED},
    optimizer.get_param_id_to_sharded_param_map: {"model_sharded_state_dict": REQUIRED, "optim_params_iter": REQUIRED},
    optimizer.make_sharded_optimizer_tensor: {"model_param": REQUIRED, "optim_param": REQUIRED, "prefix": REQUIRED},
    optimizer.optim_state_to_sharding_state: {
        "optim_state_dict": REQUIRED, "id_to_sharded_param_map": REQUIRED, "exclude_keys": (),
    },
    core.CheckpointingConfig: {
        "sharded_backend": REQUIRED, "sharded_backend_version": 1, "common_backend": "torch",
        "common_backend_version": 1,
    },
    serialization.get_default_save_sharded_strategy: {"backend": zarr.BACKEND, "version": 1},
    serialization.get_default_save_common_strategy: {"backend": zarr.BACKEND, "version": 1},
    serialization.get_default_load_sharded_strategy: {"checkpoint_dir": REQUIRED},
    core.check_is_distributed_checkpoint: {"checkpoint_dir": REQUIRED},
    core.maybe_load_config: {"checkpoint_dir": REQUIRED},
    core.save_config: {"config": REQUIRED, "checkpoint_dir": REQUIRED},
    fully_parallel.FullyParallelSaveStrategyWrapper: {
        "strategy": REQUIRED, "parallelization_group": NONE, "do_cache_distribution": False,
    },
    fully_parallel.FullyParallelLoadStrategyWrapper: {
        "strategy": REQUIRED, "parallelization_group": NONE, "do_cache_distribution": False,
        "exchange_algo": "broadcast",
    },
}  # fmt: skip
STRICT = [
    "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "return_unexpected",
    "return_all", "ignore_all",
]  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_parameters_and_defaults(function):
    found = inspect.signature(function).parameters
    assert {name: parameter.default for name, parameter in found.items()} == SIGNATURES[function]
    if function is not serialization.load_content_metadata:
        assert list(found) == list(SIGNATURES[function])


def test_strict_handling():
    modes = serialization.StrictHandling
    assert [mode.value for mode in modes] == STRICT
    assert [mode.name for mode in modes] == [value.upper() for value in STRICT]
    assert [m.value for m in modes if not modes.requires_explicit_ckpt_mismatch_check(m)] == STRICT[:1]
    assert {m.value for m in modes if modes.requires_global_app_metadata(m)} == {v for v in STRICT if v.endswith("all")}
    assert [m.value for m in modes if m.looks_for_missing] == ["log_all", "raise_all", "return_all"]
    assert {m.value for m in modes if modes.requires_returning_mismatch_keys(m)} == {STRICT[5], STRICT[6]}


PACKAGE = [
    "LocalNonpersistentObject", "ShardedObject", "ShardedTensor", "check_is_distributed_checkpoint", "load",
    "load_common_state_dict", "load_content_metadata", "load_plain_tensors", "load_tensors_metadata",
    "remove_sharded_tensors", "save",
]  # fmt: skip


def test_names_of_the_package():
    import functional_ckpt.torch.megatron as package

    assert {*PACKAGE} < {*package.__all__}
    assert package.save is serialization.save
    assert all(getattr(package, name).__name__ == name for name in PACKAGE)


def test_default_strategies(tmp_path):
    assert isinstance(serialization.get_default_save_sharded_strategy(), zarr.ZarrSaveShardedStrategy)
    assert isinstance(serialization.get_default_save_common_strategy(), zarr.ZarrSaveCommonStrategy)
    serialization.save({"step": 3}, tmp_path)
    assert isinstance(serialization.get_default_load_sharded_strategy(tmp_path), zarr.ZarrLoadShardedStrategy)
    with pytest.raises(CheckpointingException, match="not a distributed checkpoint"):
        serialization.get_default_load_sharded_strategy(tmp_path / "..")


def test_other_names():
    assert "keep_vars=True" in optimizer.KEEP_VARS_HINT
    assert async_utils.AsyncRequest is async_calls.AsyncRequest
    assert core.CONFIG_FNAME == "metadata.json"
    assert serialization.CkptShardedMetadata is not None
    for name in ("SaveSharded", "LoadSharded", "SaveCommon", "LoadCommon"):
        assert inspect.isclass(getattr(zarr, f"Zarr{name}Strategy"))
