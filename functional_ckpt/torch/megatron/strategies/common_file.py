"""The common half in Megatron's own format, one file of ``torch.save``: this library only reads it."""

from pathlib import Path
from typing import Any

import numpy as np

from functional_ckpt.errors import NotACheckpointError, PolicyError
from functional_ckpt.run.objects import object_from_bytes
from functional_ckpt.run.policy import LoadPolicy
from functional_ckpt.store.access import StorePolicy
from functional_ckpt.store.opening import open_store
from functional_ckpt.torch.megatron.halves import COMMON_FILE
from functional_ckpt.torch.megatron.sharded_base import ShardedStateDict, StateDict
from functional_ckpt.torch.megatron.strategies.base import (
    LoadCommonStrategy,
    ReadsOneFormat,
    StrategyAction,
    register_built_in_strategy,
)

__all__ = ["TorchLoadCommonStrategy"]

_BACKEND, _VERSION = "torch", 1


class TorchLoadCommonStrategy(ReadsOneFormat, LoadCommonStrategy):
    """Loads the common half from Megatron's ``common.pt``, on every rank. It does not handle sharded objects.

    Parameters
    ----------
    safe_globals
        Classes that are allowed for objects in it, see `LoadPolicy`; any if ``"trust"``.
    store
        How to reach an object store, see `StorePolicy`.

    Examples
    --------
    >>> import tempfile, torch
    >>> path = tempfile.mkdtemp()
    >>> torch.save({"step": 3}, path + "/common.pt")
    >>> TorchLoadCommonStrategy().load_common(path)
    {'step': 3}
    """

    reads = (_BACKEND, _VERSION)

    def __init__(self, *, safe_globals: Any = (), store: StorePolicy = StorePolicy()) -> None:
        self.policy = LoadPolicy(safe_globals=safe_globals, store=store)

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Return the common half, tensors on the CPU.

        Raises
        ------
        CheckpointingException
            If there is none, it is damaged, or holds an object of a class that is not allowed.
        """
        data = open_store(checkpoint_dir, access=self.policy.store).read(COMMON_FILE)
        if data is None:
            raise NotACheckpointError("the common half is missing", path=f"{checkpoint_dir}/{COMMON_FILE}")
        state: StateDict = object_from_bytes(COMMON_FILE, np.frombuffer(data, np.uint8), self.policy.safe_globals)
        return state

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Raise: sharded objects are loaded by the strategy of the sharded half."""
        raise PolicyError("this strategy does not load sharded objects", path=str(checkpoint_dir))


register_built_in_strategy(StrategyAction.LOAD_COMMON, _BACKEND, _VERSION, TorchLoadCommonStrategy())
