"""Optimizer state dicts as sharded ones, by the names of ``megatron.core.dist_checkpointing.optimizer``."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from functional_ckpt.errors import SpecError
from functional_ckpt.torch.megatron.exceptions import ShapeAssertionError
from functional_ckpt.torch.megatron.factory import ShardedTensorFactory
from functional_ckpt.torch.megatron.mapping import LocalNonpersistentObject
from functional_ckpt.torch.megatron.sharded_base import ShardedStateDict, StateDict, logger
from functional_ckpt.torch.megatron.sharded_tensor import ShardedTensor
from functional_ckpt.torch.megatron.state_tree import leaves_of

__all__ = [
    "KEEP_VARS_HINT",
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
]

#: The remedy if the leaves of a model's state dict hold copies of its parameters.
KEEP_VARS_HINT = "Make the model's state dict with keep_vars=True, so that it holds the parameters themselves"


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """Return ``id(parameter) -> its number`` in an optimizer; the first number if a parameter occurs twice.

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> get_optim_param_to_id_map([w, w]) == {id(w): 0}
    True
    """
    numbers: dict[int, int] = {}
    for number, parameter in enumerate(optim_params_iter):
        numbers.setdefault(id(_local(parameter)), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Return the number of each parameter of an optimizer -> its sharded tensor or factory in the model's state dict.

    Parameters
    ----------
    model_sharded_state_dict
        Must hold the parameters themselves: make it from a ``state_dict(keep_vars=True)``.
    optim_params_iter
        The parameters, in the optimizer's order.

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> found = get_param_id_to_sharded_param_map({"w": ShardedTensor.from_rank_offsets("w", w)}, [w])
    >>> found[0].key
    'w'
    """
    numbers = get_optim_param_to_id_map(optim_params_iter)
    found: dict[int, ShardedTensor | ShardedTensorFactory] = {}
    for leaf in leaves_of(model_sharded_state_dict):
        if isinstance(leaf, ShardedTensor | ShardedTensorFactory) and id(leaf.data) in numbers:
            found[numbers[id(leaf.data)]] = leaf
    if not found:
        logger.warning("no sharded tensor of the model holds a parameter of the optimizer. %s", KEEP_VARS_HINT)
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedTensor | ShardedTensorFactory, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Return an optimizer's tensor, sharded as its parameter, under the key ``<prefix>.<key of the parameter>``.

    Raises
    ------
    CheckpointingException
        If its shape is not that of the parameter (an ``AssertionError`` too); names the key.

    Examples
    --------
    >>> w = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 1, 3))
    >>> moment = make_sharded_optimizer_tensor(w, torch.zeros(2, dtype=torch.float64), "optimizer.state.exp_avg")
    >>> moment.key, moment.dtype, moment.global_offset
    ('optimizer.state.exp_avg.w', torch.float64, (2,))
    """
    key, data = f"{prefix}.{model_param.key}", _local(optim_param)
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=data)
    if model_param.flattened_range is None and tuple(data.shape) != tuple(model_param.local_shape):
        raise ShapeAssertionError(
            "an optimizer's tensor has another shape than its parameter",
            key,
            expected=tuple(model_param.local_shape),
            found=tuple(data.shape),
        )
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ShardedTensor | ShardedTensorFactory],
    exclude_keys: tuple[str, ...] = (),
) -> None:
    """Replace the tensors of an optimizer's state dict by sharded tensors, in place.

    The keys are ``optimizer.state.<name>.<key of the parameter>``. The numbers of the parameters become local objects,
    which are not stored, since other ranks number their parameters differently.

    Parameters
    ----------
    optim_state_dict
        With ``state`` and ``param_groups``, as torch optimizers return it.
    id_to_sharded_param_map
        From `get_param_id_to_sharded_param_map`.
    exclude_keys
        Names of states to leave out.

    Raises
    ------
    CheckpointingException
        If a parameter is not in the map (a ``ValueError`` too); nothing changes then.

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> adam = torch.optim.Adam([w])
    >>> w.grad = torch.ones(2)
    >>> _ = adam.step()
    >>> state = adam.state_dict()
    >>> model = {"w": ShardedTensor.from_rank_offsets("w", w)}
    >>> numbers = get_param_id_to_sharded_param_map(model, [w])
    >>> optim_state_to_sharding_state(state, numbers, ("step",))
    >>> [tensor.key for tensor in state["state"][0].values()]
    ['optimizer.state.exp_avg.w', 'optimizer.state.exp_avg_sq.w']
    """
    state: dict[Any, Any] = {}
    for number, values in optim_state_dict["state"].items():
        wanted = {name: value for name, value in values.items() if name not in exclude_keys}
        if wanted and number not in id_to_sharded_param_map:
            raise SpecError(
                "a parameter of the optimizer is in no sharded tensor of the model", found=number, remedy=KEEP_VARS_HINT
            )
        state[number] = {
            name: make_sharded_optimizer_tensor(id_to_sharded_param_map[number], value, f"optimizer.state.{name}")
            for name, value in wanted.items()
        }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["param_groups"] = groups
    optim_state_dict["state"] = state


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
