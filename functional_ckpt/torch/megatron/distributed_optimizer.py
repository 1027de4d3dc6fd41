"""The state of Megatron's ``DistributedOptimizer`` as flat shards, one per range of a parameter that the rank holds.

A data parallel rank holds one slice of every bucket of parameters: arbitrary ranges of flattened parameters. Each range
becomes `ShardedTensor` leaves with a `flattened_range`, whose data are the optimizer's own tensors: a save copies and
gathers nothing, and a load, under any other layout, fills them in place. Padding belongs to no parameter and is never
saved. Megatron is not imported: the code uses the attributes of the optimizer of version 0.16.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import attrs
import torch

from functional_ckpt.errors import CheckpointError, ShapeError, SpecError, UnsupportedLeafError, raise_problems
from functional_ckpt.torch.megatron.factory import ShardedTensorFactory
from functional_ckpt.torch.megatron.sharded_base import ShardedStateDict, StateDict
from functional_ckpt.torch.megatron.sharded_state import as_ours
from functional_ckpt.torch.megatron.sharded_tensor import ShardedTensor
from functional_ckpt.torch.megatron.state_tree import leaves_of

__all__ = ["FlatPart", "flat_parts", "load_optimizer_state", "sharded_optimizer_state"]

_PREFIX = "optimizer.state"
_MASTER = "fp32_param"
_STEP = "step"
_OF_EXPERTS = "is_expert_parallel"
#: The fields that identify a parameter group; NeMo has other names for two of them.
_MARKS = ("wd_mult", "pre_wd_mult", "lr_mult", "pre_lr_mult", "is_decoupled_lr", _OF_EXPERTS)


@attrs.frozen(eq=False)
class FlatPart:
    """A part of a range of a parameter: its shard, without data, and its slice of the range."""

    place: ShardedTensor
    run: slice


def sharded_optimizer_state(optimizer: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Return the state of a distributed optimizer as sharded leaves, for a save or for a load that fills it.

    Moments that do not exist yet are allocated with zeros.

    Parameters
    ----------
    optimizer
        A ``DistributedOptimizer``, or a ``ChainedOptimizer`` of such.
    model_sharded_state_dict
        ``sharded_state_dict()`` of the model below the DDP wrapper, with Megatron's leaves or ours; they hold the
        parameters themselves. Keys, shapes and replicas are taken from there.

    Returns
    -------
        ``shards``: for every state of every range the leaf ``optimizer.state.<name>.<key of the parameter>``, the
        master copy as ``fp32_param``; ``common``: the step, parameter groups and loss scale, as Megatron keeps them.

    Raises
    ------
    CheckpointingException
        All problems at once: parameters that the model's state dict lacks, factories that scatter the elements of a
        range, an optimizer of another kind.

    Examples
    --------
    >>> from types import SimpleNamespace as Made
    >>> weight, half = torch.nn.Parameter(torch.ones(2, 3)), torch.ones(2)
    >>> inner = Made(param_groups=[{"params": [half]}], state={half: {"step": 1, "exp_avg": torch.zeros(2)}})
    >>> ranges = {"param_map": {weight: {"param": Made(start=1, end=3)}}}
    >>> optimizer = Made(
    ...     optimizer=inner, gbuf_ranges=[{torch.float32: [ranges]}], model_param_group_index_map={weight: (0, 0)},
    ...     distributed_optimizer_instance_id=0, init_state_fn=None, state_dict=lambda: {"step": 1})
    >>> model = {"w": ShardedTensor.from_rank_offsets("w", weight, replica_id=(0, 0, 7))}
    >>> state = sharded_optimizer_state(optimizer, model)
    >>> [(shard.key, shard.flattened_range, shard.replica_id) for shard in state["shards"]]
    [('optimizer.state.fp32_param.w', slice(1, 3, None), (0, 0, 0)),
     ('optimizer.state.exp_avg.w', slice(1, 3, None), (0, 0, 0))]
    """
    described = {
        id(leaf.data): leaf
        for leaf in leaves_of(as_ours(model_sharded_state_dict))
        if isinstance(leaf, ShardedTensor | ShardedTensorFactory)
    }
    shards: list[ShardedTensor] = []
    problems: list[CheckpointError] = []
    for part in _parts(optimizer):
        _refuse_unsupported(part)
        _allocate_moments(part)
        for parameter, start, stop in _held_ranges(part):
            try:
                shards += _shards_of(part, parameter, described.get(id(parameter)), start, stop)
            except CheckpointError as problem:
                problems.append(problem)
    raise_problems(problems)
    return {"shards": shards, "common": optimizer.state_dict()}


def load_optimizer_state(optimizer: Any, loaded: StateDict) -> None:
    """Restore the step, parameter groups and loss scale, after a load has filled the tensors in place.

    Nothing is copied between master copies and the model's parameters: the load has filled both. A chain may have other
    optimizers than the saved one, as under another EP: parameter groups are found by their fields.

    Parameters
    ----------
    optimizer
        The optimizer whose `sharded_optimizer_state` was filled.
    loaded
        The value that the load returned for it.

    Raises
    ------
    CheckpointingException
        If a parameter group of the optimizer is not in the checkpoint. The tensors are filled then, but the step is not
        restored.

    Examples
    --------
    >>> from types import SimpleNamespace as Made
    >>> inner = Made(param_groups=[{"lr_mult": 1.0, "lr": 0.5}], state={})
    >>> state = {"common": {"optimizer": {"param_groups": [{"lr_mult": 1.0, "lr": 0.1, "step": 3}]}}}
    >>> load_optimizer_state(Made(optimizer=inner, load_state_dict=print), state)
    {'optimizer': {'param_groups': [{'lr_mult': 1.0, 'lr': 0.1, 'step': 3}]}}
    """
    optimizer.load_state_dict(_refitted(optimizer, loaded["common"]))
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            # Megatron gives all parameters one step tensor, which torch's Adam would advance once per parameter.
            if isinstance(state.get(_STEP), torch.Tensor):
                state[_STEP] = state[_STEP].clone()


def _refitted(optimizer: Any, common: Any) -> Any:
    """Return the saved ``state_dict`` of an optimizer, rearranged for the chain of `optimizer`."""
    saved = common if isinstance(common, list) else [common]
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    groups = [group for each in saved for group in each["optimizer"]["param_groups"]]
    fitted = []
    for number, part in enumerate(chain):
        state = saved[number] if len(saved) == len(chain) else saved[0]
        own = [] if getattr(part, "is_stub_optimizer", False) else part.optimizer.param_groups
        found = [_like(group, groups) for group in own]
        fitted.append({**state, "optimizer": {**state["optimizer"], "param_groups": found}})
    return fitted[0] if len(fitted) == 1 else fitted


def _like(own: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the saved group with the identifying fields of the group `own` of an optimizer.

    The field for expert parameters counts only if some saved group has it set: if a rank has all experts, Megatron
    treats them like other parameters.
    """
    marks = {name: own[name] for name in _MARKS if name in own}
    for names in (marks, marks.keys() - {_OF_EXPERTS}):
        for group in groups:
            if all(group.get(name) == marks[name] for name in names):
                return {**group, **marks}
    raise SpecError(
        "no parameter group of the checkpoint matches one of the optimizer",
        expected=marks,
        found=[{name: group.get(name) for name in marks} for group in groups],
        remedy="Make the optimizer with the learning rate and weight decay multipliers of the save",
    )


def flat_parts(leaf: ShardedTensor | ShardedTensorFactory, start: int, stop: int) -> list[FlatPart]:
    """Return the shards that store the elements from `start` to `stop` of a flattened parameter.

    Parameters
    ----------
    leaf
        How the model stores the parameter. A factory is called with element numbers, to see where it puts each element.
    start, stop
        Range in elements of the flattened local parameter.

    Raises
    ------
    CheckpointingException
        If a factory does not keep the elements of the range contiguous; the error names the key.

    Examples
    --------
    >>> def halves(key, tensor, replica_id, flattened_range):
    ...     return [ShardedTensor.from_rank_offsets(key, half, (0, i, 2)) for i, half in enumerate(tensor.chunk(2))]
    >>> factory = ShardedTensorFactory("w", torch.ones(4, 3), halves, torch.cat)
    >>> [(part.place.global_offset, part.place.flattened_range, part.run) for part in flat_parts(factory, 4, 9)]
    [((0, 0), slice(4, 6, None), slice(0, 2, None)), ((2, 0), slice(0, 3, None), slice(2, 5, None))]
    """
    if isinstance(leaf, ShardedTensor):
        return [FlatPart(replace(leaf, data=None, flattened_range=slice(start, stop)), slice(0, stop - start))]
    count = leaf.data.numel()
    numbers = torch.arange(count, dtype=torch.int32 if count < 2**31 else torch.int64)
    built = leaves_of(as_ours(replace(leaf, data=numbers.reshape(leaf.data.shape)).build()))
    found = [_contiguous_part(shard, start, stop) for shard in built if isinstance(shard, ShardedTensor)]
    parts = [part for part in found if part is not None]
    if sum(part.run.stop - part.run.start for part in parts) != stop - start:
        raise SpecError(
            "a factory does not store every element of a parameter once",
            leaf.key,
            offset=(start,),
            expected=stop - start,
        )
    return parts


def _contiguous_part(shard: ShardedTensor, start: int, stop: int) -> FlatPart | None:
    """Return the part of a built shard that holds the numbers from `start` to `stop`; None if there is none."""
    numbers = torch.empty(0) if shard.data is None else shard.data.reshape(-1)
    (places,) = torch.where((numbers >= start) & (numbers < stop))
    if not len(places):
        return None
    first, last = int(places[0]), int(places[-1]) + 1
    number = int(numbers[first])
    if not torch.equal(numbers[first:last], torch.arange(number, number + last - first, dtype=numbers.dtype)):
        raise SpecError(
            "a factory does not keep a range of its parameter contiguous",
            shard.key,
            shape=tuple(shard.global_shape),
            offset=tuple(shard.global_offset),
            expected=f"elements {start} to {stop} one after the other",
            remedy="Save this optimizer in one of Megatron's own formats",
        )
    place = replace(shard, data=None, flattened_range=slice(first, last))
    return FlatPart(place, slice(number - start, number - start + last - first))


def _shards_of(
    part: Any, parameter: torch.Tensor, leaf: ShardedTensor | ShardedTensorFactory | None, start: int, stop: int
) -> Iterator[ShardedTensor]:
    """Yield the shards of all states of one range of a parameter."""
    if leaf is None:
        names = (pair for chunk in getattr(part, "model_chunks", ()) for pair in chunk.named_parameters())
        raise SpecError(
            "a parameter of the optimizer is in no sharded tensor of the model",
            next((name for name, one in names if one is parameter), None),
            shape=tuple(parameter.shape),
            remedy="Pass sharded_state_dict() of the model itself, made after the DDP wrapper",
        )
    group, order = part.model_param_group_index_map[parameter]
    master = part.optimizer.param_groups[group]["params"][order]
    states = {_MASTER: master, **part.optimizer.state[master]}
    states.pop(_STEP, None)
    replica_id = _across_data_parallel(leaf, part.distributed_optimizer_instance_id)
    for flat in flat_parts(leaf, start, stop):
        for name, tensor in states.items():
            key = f"{_PREFIX}.{name}.{flat.place.key}"
            if tuple(tensor.shape) != (stop - start,):
                raise ShapeError(
                    "a state of the optimizer has another size than the range of its parameter",
                    key,
                    expected=(stop - start,),
                    found=tuple(tensor.shape),
                )
            data = tensor.detach()[flat.run]
            yield replace(flat.place, key=key, data=data, dtype=data.dtype, replica_id=replica_id)


def _across_data_parallel(leaf: ShardedTensor | ShardedTensorFactory, instance: int) -> tuple[int, ...]:
    """Return the replica id of a parameter with `instance` instead of its last coordinate, the data parallel rank.

    Data parallel ranks hold copies of a parameter, but parts of its state; instances of the optimizer hold copies.
    """
    if not isinstance(leaf.replica_id, tuple) or len(leaf.replica_id) != 3:
        raise SpecError(
            "the replica id of a parameter has no data parallel rank",
            leaf.key,
            expected="(pipeline, tensor, data parallel)",
            found=leaf.replica_id,
        )
    return (*leaf.replica_id[:2], instance)


def _parts(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain that have parameters."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chain if not getattr(part, "is_stub_optimizer", False)]


def _held_ranges(part: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield the parameters of which this rank holds a range, and the range in elements."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _refuse_unsupported(part: Any) -> None:
    config = getattr(part, "config", None)
    if not hasattr(part, "gbuf_ranges"):
        found = type(part).__name__
    elif getattr(config, "use_precision_aware_optimizer", False):
        found = "use_precision_aware_optimizer: its state is stored in scaled form"
    elif hasattr(part.optimizer, "sub_optimizers"):
        found = "optimizer_cpu_offload: its state exists twice"
    else:
        return
    raise UnsupportedLeafError(
        "the state of this optimizer cannot be saved as ranges of parameters",
        expected="DistributedOptimizer",
        found=found,
        remedy="Save it in one of Megatron's own formats",
    )


def _allocate_moments(part: Any) -> None:
    """Allocate the moments, with zeros, of an optimizer that has not stepped yet."""
    inner = part.optimizer
    if part.init_state_fn is not None:
        part.init_state_fn(inner, part.config)
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        for state in inner.state.values():
            state.setdefault(_STEP, torch.tensor(0.0))
