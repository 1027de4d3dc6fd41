"""How the ranks of a save agree on a plan: each plans alone, or they use a cached plan, or they gather their specs."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import attrs
import numpy as np

from functional_ckpt.errors import CheckpointError, DuplicateKeyError, ProblemError, SpecError, raise_problems
from functional_ckpt.plan.agreement import Basis, Proposal, contents_agree, known_shardings, propose, world_digest
from functional_ckpt.plan.check import check_conflicts
from functional_ckpt.plan.derived import Deriving
from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.local import local_array_plans, placed_arrays, plan_local_save
from functional_ckpt.plan.save import SavePlan, plan_save, restrict
from functional_ckpt.plan.state import (
    GlobalState,
    LocalState,
    Part,
    content_problems,
    merge_structures,
    with_values,
)
from functional_ckpt.run.capture import Captured
from functional_ckpt.run.comm import Gather, agree, together
from functional_ckpt.run.policy import SavePolicy
from functional_ckpt.spec.sharding import Sharding
from functional_ckpt.spec.table import ShardRows, ShardTable
from functional_ckpt.store.encoding import node_name
from functional_ckpt.store.exchange import Exchange
from functional_ckpt.store.opening import open_store

__all__ = ["Plan", "PlanMemory", "Planner", "decode_state", "encode_state", "plan_alone", "plan_gathered"]

#: Plans in a cache: a training loop saves one or two kinds of state.
_KEPT = 8


@attrs.frozen
class Plan(Deriving):
    """What a save does: the merged structure of all ranks, the layout of every array, and `mine`, this rank's part.

    It has no values, attributes and digests: a `PlanMemory` keeps it, with what is derived from it.
    """

    structure: GlobalState
    arrays: tuple[ArrayPlan, ...]
    mine: SavePlan


class PlanMemory:
    """A cache of plans: for each basis the world that it was part of, and the plan made for that world.

    A basis is all inputs of a rank to a plan, and the key of a world the fingerprints of all ranks' bases, so that a
    cached plan equals a new one. Threads may share a cache.
    """

    def __init__(self) -> None:
        self._plans: list[tuple[Basis, bytes, Plan]] = []
        self._lock = Lock()

    def find(self, basis: Basis) -> tuple[Basis, bytes, Plan] | None:
        """Return an equal basis, which has its digests already, the last world with it, and the plan for that."""
        with self._lock:
            return next((kept for kept in reversed(self._plans) if kept[0] == basis), None)

    def keep(self, basis: Basis, world: bytes, plan: Plan) -> None:
        """Add a plan, and drop the oldest."""
        with self._lock:
            others = [kept for kept in self._plans if kept[0] is not basis and kept[0] != basis]
            self._plans = [*others[1 - _KEPT :], (basis, world, plan)]


class Planner:
    """Finds the plan of one save. Every rank makes the same decisions, from the proposals of all ranks."""

    def __init__(self, path: str | Path, policy: SavePolicy, gather: Gather, memory: PlanMemory) -> None:
        self.path, self.policy, self.gather, self.memory = path, policy, gather, memory

    def agree(self, describe: Callable[[], Captured]) -> tuple[Plan, GlobalState, Captured]:
        """Describe this rank's state and agree with all ranks; return the plan, the merged state, and this rank's.

        Raises
        ------
        CheckpointError
            The problems of all ranks, on all ranks.
        """
        brought: list[tuple[Captured, Basis, tuple[bytes, Plan] | None]] = []

        def propose_mine() -> Proposal:
            mine = describe()
            basis = self._basis(mine)
            known = self.memory.find(basis)
            basis, known_plan = (known[0], known[1:]) if known else (basis, None)
            brought.append((mine, basis, known_plan))
            own = mine.own.with_table(self.gather.rank, sum(mine.counts[: len(mine.common.arrays)]))
            proposal = propose(basis, mine.common.contents(), own, self.policy.budget_nbytes)
            return attrs.evolve(proposal, planned=known_plan[0]) if known_plan else proposal

        proposals = together(self.gather, propose_mine)
        mine, basis, known = brought[0]
        budget = min(proposal.budget_nbytes for proposal in proposals)
        world = world_digest(proposals, budget)
        # If one rank lacks the cached plan, all plan anew: otherwise it would wait for specs that no rank sends.
        remembered = known[1] if known and all(proposal.planned == world for proposal in proposals) else None
        shardings = None if remembered else known_shardings(basis, proposals)
        parts = self._parts(mine.common, proposals, remembered is None and shardings is None)
        plan, state = agree(self.gather, lambda: self._planned(remembered, basis, shardings, parts, proposals, budget))
        self.memory.keep(basis, world, plan)
        return plan, state, mine

    def _basis(self, mine: Captured) -> Basis:
        store, group = open_store(self.path, access=self.policy.store), self.gather
        if group.size > 1 and not store.capabilities.shared:
            raise SpecError("other ranks cannot see this store", path=store.url, remedy="Save to a shared file system")
        return Basis(
            rank=group.rank,
            size=group.size,
            shared_ok=store.capabilities.shared_chunks,
            owned_ok=isinstance(group, Exchange),
            layout=self.policy.layout,
            replicas=self.policy.replicas,
            common=mine.common.structure(),
            own=mine.own.structure(),
            counts=mine.counts,
        )

    def _parts(self, mine: LocalState, proposals: Sequence[Proposal], needs_specs: bool) -> list[Part]:
        """Return the parts of all ranks' states that this rank needs; parts that differ between ranks are gathered."""
        if not needs_specs and contents_agree(proposals):
            return [(self.gather.rank, mine), *_owns(proposals)]
        wanted = mine.with_table(self.gather.rank) if needs_specs else mine.contents()
        gathered = together(self.gather, lambda: encode_state(wanted))
        known: dict[bytes, tuple[LocalState, Any]] = {}
        return [*enumerate(decode_state(*each, known) for each in gathered), *_owns(proposals)]

    def _planned(
        self,
        remembered: Plan | None,
        basis: Basis,
        shardings: Mapping[str, Sharding] | None,
        parts: Sequence[Part],
        proposals: Sequence[Proposal],
        budget_nbytes: int,
    ) -> tuple[Plan, GlobalState]:
        problems = content_problems(parts, self.policy.replicated)
        try:
            if remembered is not None:
                plan = remembered
            elif shardings is not None:
                owns = [(rank, own.structure()) for rank, own in _owns(proposals)]
                plan = plan_alone(basis, owns, shardings, budget_nbytes)
            else:
                plan = plan_gathered(basis, [(rank, state.structure()) for rank, state in parts], budget_nbytes)
        except CheckpointError as error:
            raise_problems([*problems, error])
            raise
        raise_problems(problems)
        return plan, with_values(plan.structure, parts)


def _owns(proposals: Sequence[Proposal]) -> list[Part]:
    return [(rank, proposal.own) for rank, proposal in enumerate(proposals) if proposal.own is not None]


def plan_alone(basis: Basis, owns: Sequence[Part], shardings: Mapping[str, Sharding], budget_nbytes: int) -> Plan:
    """Plan a rank's part by itself; `owns` are the structures of what only one rank has, of all ranks.

    `shardings` tell how all ranks hold the arrays of which the basis has shards.

    Raises
    ------
    CheckpointError
        The problems of merging and of planning, all at once.
    """
    structure, problems = merge_structures([(basis.rank, basis.common), *owns])
    items = placed_arrays(basis.common, owns, basis.size, {alias.key for alias in structure.aliases}, shardings)
    arrays = local_array_plans(items, basis.layout, basis.shared_ok, basis.owned_ok)
    raise_problems([*problems, *_name_collisions(arrays)])
    plan = plan_local_save(
        basis.rank, items, basis.layout, basis.replicas, basis.shared_ok, basis.owned_ok, budget_nbytes, arrays
    )
    # The plan counts the shards of the items; buffers are there for tied leaves too.
    leaves = (*basis.common.arrays, *basis.own.arrays)
    ends = np.cumsum([0, *basis.counts]).tolist()
    buffers = {leaf.key: range(*ends[i : i + 2]) for i, leaf in enumerate(leaves)}
    keys = dict.fromkeys(item.key for item in items if item.key in buffers)  # shards of one key come in a row
    numbers = np.array([*(number for key in keys for number in buffers[key]), -1], np.int64)
    shard = np.where(plan.pieces.shard >= 0, numbers[plan.pieces.shard], -1)
    return Plan(structure, arrays, attrs.evolve(plan, pieces=attrs.evolve(plan.pieces, shard=shard)))


def plan_gathered(basis: Basis, parts: Sequence[Part], budget_nbytes: int) -> Plan:
    """Plan for all ranks from the structures of all, tables included, and return the part of this rank.

    Raises
    ------
    CheckpointError
        The problems of merging and of planning, all at once.
    """
    structure, problems = merge_structures(parts)
    leaves = {id(part.arrays): part.arrays for _, part in parts}.values()
    copied = {leaf.key for each in leaves for leaf in each if leaf.is_copy}
    copied -= {leaf.key for each in leaves for leaf in each if not leaf.is_copy}
    # Stable: a rank's own part comes after what it may have in common.
    tables = [(each, part.table) for each, part in sorted(parts, key=lambda part: part[0]) if part.table is not None]
    table, conflicts = ShardTable.join([table for _, table in tables], copied, [each for each, _ in tables])
    problems = (*problems, *check_conflicts(conflicts))
    table = table.without({alias.key for alias in structure.aliases})
    try:
        plan = plan_save(table, basis.layout, basis.replicas, basis.shared_ok, basis.owned_ok, budget_nbytes)
    except CheckpointError as error:
        raise_problems([*problems, error])
        raise
    raise_problems([*problems, *_name_collisions(plan.arrays)])
    return Plan(structure, plan.arrays, restrict(plan, basis.rank))


def encode_state(state: LocalState) -> tuple[bytes, ShardRows | None]:
    """Return what ranks may have in common as bytes, so that equal ones are unpacked and merged once."""
    table = state.table
    alike = (attrs.evolve(state, table=None), table and (table.arrays, table.replicas))
    return pickle.dumps(alike), table.rows if table else None


def decode_state(described: bytes, rows: ShardRows | None, known: dict[bytes, tuple[LocalState, Any]]) -> LocalState:
    """Return a state that `encode_state` described; equal descriptions become one object, which `known` remembers."""
    if described not in known:
        known[described] = pickle.loads(described)  # noqa: S301 - from ranks of this group, never from storage
    state, table = known[described]
    if rows is None:
        return state
    arrays, replicas = table
    return attrs.evolve(state, table=ShardTable(arrays, replicas, rows))


def _name_collisions(arrays: Sequence[ArrayPlan]) -> list[ProblemError]:
    first: dict[str, str] = {}
    problems: list[ProblemError] = []
    for array in arrays:
        name = node_name(array.spec.key).casefold()
        other = first.setdefault(name, array.spec.key)
        if other != array.spec.key:
            problems.append(
                DuplicateKeyError("two keys have one node name", array.spec.key, expected=other, found=name)
            )
    return problems
