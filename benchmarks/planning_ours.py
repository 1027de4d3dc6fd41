"""What a rank of ours computes for one save; the functions that know today's planning, each a few lines.

Every rank computes it, where DCP has a coordinator. As with DCP: what ranks send is made outside of the timing, what
travels is not counted, and what has to be unpickled, planned and written down is.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from benchmarks.planning_world import COLUMNS, DTYPE, RowCuts
from benchmarks.stages import Stages
from functional_ckpt.plan.agreement import Basis, contents_agree, propose, world_digest
from functional_ckpt.plan.local import plan_local_save
from functional_ckpt.plan.save import SavePlan
from functional_ckpt.plan.state import (
    ArrayLeaf,
    ChunkRows,
    LocalState,
    Part,
    build_manifest,
    content_problems,
    merge_structures,
    with_values,
)
from functional_ckpt.run.planning import Plan, decode_state, encode_state, plan_gathered
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.mesh import Mesh
from functional_ckpt.spec.placement import Shard
from functional_ckpt.spec.sharding import PlacedArray, Sharding, ShardSpec

POLICY = SavePolicy()
#: Shapes of a transformer's tensors, of which a world of any size holds the same.
SHAPES = ((4096, 4096), (11008, 4096), (1024, 4096), (4096,))


def plan_all(cuts: RowCuts) -> dict[str, float]:
    """Return the CPU seconds of each stage."""
    stages = Stages()
    messages = [_message(cuts, rank) for rank in range(cuts.ranks)]
    with stages("gather"):
        parts = gathered(messages)
    messages.clear()
    with stages("plan"):
        structures = [(rank, part.structure()) for rank, part in parts]
        plan = plan_gathered(_basis(parts[0][1], cuts.ranks), structures, POLICY.budget_nbytes)
    messages = _receipts(plan, cuts.ranks)
    with stages("metadata"):
        _manifest(plan, messages)
    return stages.cpu_s


def plan_again(cuts: RowCuts) -> dict[str, float]:
    """Return the CPU seconds of planning the same world once more: ranks say digests, and remember the plan."""
    stages = Stages()
    state = _state(cuts, 0)
    first = propose(_basis(state, cuts.ranks), state.contents(), LocalState(), POLICY.budget_nbytes)
    # Ranks differ in their shards; any digests of that length cost the same.
    said = [attrs.evolve(first, basis=rank.to_bytes(16, "little")) for rank in range(cuts.ranks)]
    world = world_digest(said, POLICY.budget_nbytes)
    messages = [pickle.dumps(attrs.evolve(proposal, planned=world)) for proposal in said]
    structure, _ = merge_structures([(0, state.structure())])
    with stages("plan"):
        proposals = [pickle.loads(message) for message in messages]
        remembered = world_digest(proposals, POLICY.budget_nbytes) == world
        if not (remembered and contents_agree(proposals) and all(p.planned == world for p in proposals)):
            raise ValueError("the plan was not remembered")
        content_problems([(0, state)])
        with_values(structure, [(0, state)])
    return stages.cpu_s


def gathered(messages: Sequence[bytes]) -> list[Part]:
    """What a rank makes of the states of all ranks."""
    known: dict[bytes, Any] = {}
    return [(rank, decode_state(*pickle.loads(message), known)) for rank, message in enumerate(messages)]


def local_arrays(ranks: int, arrays: int, distinct: bool) -> list[PlacedArray]:
    """What a rank knows of a model cut by rows; with `distinct` no two arrays have one shape."""
    sharding = Sharding(Mesh.line(ranks), [Shard(0)])
    placed = []
    for number in range(arrays):
        rows, *rest = SHAPES[number % len(SHAPES)]
        shape = (rows + number if distinct else rows, *rest)
        placed.append(PlacedArray(ArraySpec(f"model.layers.{number}.weight", shape, DTYPE), sharding))
    return placed


def plan_local(ranks: int, local: Sequence[PlacedArray]) -> SavePlan:
    """Plan what the rank in the middle of the world does, without the others."""
    return plan_local_save(ranks // 2, local, POLICY.layout)


def _basis(state: LocalState, ranks: int) -> Basis:
    counts = (1,) * len(state.arrays)
    return Basis(0, ranks, True, True, POLICY.layout, POLICY.replicas, state.structure(), LocalState(), counts)


def _message(cuts: RowCuts, rank: int) -> bytes:
    """What a rank sends."""
    return pickle.dumps(encode_state(_state(cuts, rank).with_table(rank)))


def _state(cuts: RowCuts, rank: int) -> LocalState:
    leaves, shards = [], []
    for array, key in enumerate(cuts.keys):
        spec = ArraySpec(key, cuts.shape(array), DTYPE)
        start, stop = cuts.rows(array, rank)
        leaves.append(ArrayLeaf(spec, tuple(key.split("."))))
        shards.append(ShardSpec(spec, Box((start, 0), (stop, COLUMNS))))
    return LocalState(tuple(leaves), tuple(shards))


def _receipts(plan: Plan, ranks: int) -> list[bytes]:
    """What the ranks report when they have written: the digests of some chunks each."""
    counts = [array.grid.size for array in plan.arrays]
    numbers = np.repeat(np.arange(len(counts)), counts)
    chunks = np.concatenate([np.arange(count) for count in counts])
    words = np.zeros((len(chunks), 2), np.int64)
    return [
        pickle.dumps(ChunkRows(numbers[rank::ranks], chunks[rank::ranks], words[rank::ranks])) for rank in range(ranks)
    ]


def _manifest(plan: Plan, messages: Sequence[bytes]) -> bytes:
    """The text that describes the checkpoint."""
    chunks = ChunkRows.joined([pickle.loads(message) for message in messages])
    return build_manifest(plan.structure, plan.arrays, chunks).to_json()
