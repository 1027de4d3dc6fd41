"""How the ranks of a save come to one plan: alone, from memory, or by gathering what they hold."""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import attrs
import numpy as np

from functional_ckpt.capture import Captured
from functional_ckpt.comm import Gather, agree, together
from functional_ckpt.errors import CheckpointError, DuplicateKeyError, ProblemError, SpecError, raise_problems
from functional_ckpt.plan.agreement import Proposal, contents_agree, is_plannable_alone, propose, world_digest
from functional_ckpt.plan.check import check_conflicts
from functional_ckpt.plan.layout import ArrayPlan
from functional_ckpt.plan.local import local_array_plans, plan_local_save
from functional_ckpt.plan.save import SavePlan, plan_save, restrict
from functional_ckpt.plan.state import GlobalState, LocalState, Part, merge_states, merge_values, placed_leaves
from functional_ckpt.policy import SavePolicy
from functional_ckpt.spec.sharding import ShardSpec
from functional_ckpt.spec.table import ShardRows, ShardTable
from functional_ckpt.store.encoding import node_name
from functional_ckpt.store.exchange import Exchange
from functional_ckpt.store.opening import open_store

__all__ = ["Agreed", "Planner", "opened", "plan_together", "sealed"]

#: Plans kept per process: a training loop saves one or two kinds of state.
_KEPT = 8


@attrs.frozen
class Agreed:
    """What all ranks have agreed on: the merged state, the layout of every array, and `mine`, this rank's part."""

    state: GlobalState
    arrays: tuple[ArrayPlan, ...]
    mine: SavePlan


class _Memory:
    """The last plans of this process: for what a rank held, the world that it was part of, and the plan."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, tuple[bytes, Agreed]] = OrderedDict()
        self._lock = Lock()

    def find(self, mine: Hashable) -> tuple[bytes, Agreed] | None:
        """Return the world in which this rank last held the same, and the plan for it."""
        with self._lock:
            return self._plans.get(mine)

    def keep(self, mine: Hashable, world: bytes, agreed: Agreed) -> None:
        """Remember a plan, and forget the oldest."""
        with self._lock:
            self._plans[mine] = world, agreed
            self._plans.move_to_end(mine)
            while len(self._plans) > _KEPT:
                self._plans.popitem(last=False)


_MEMORY = _Memory()


class Planner:
    """One save's way to a plan. Every rank makes the same decisions, from what all ranks have said."""

    def __init__(self, path: str | Path, policy: SavePolicy, gather: Gather) -> None:
        self.path, self.policy, self.gather = path, policy, gather
        self.shared_ok = True
        self.owned_ok = isinstance(gather, Exchange)
        self._known: tuple[bytes, Agreed] | None = None
        self._mine: Hashable = None

    def agree(self, describe: Callable[[], Captured]) -> tuple[Agreed, Captured]:
        """Describe this rank's state, come to a plan with all ranks, and return both.

        Raises
        ------
        CheckpointError
            The problems of all ranks, on all ranks.
        """
        held: list[Captured] = []

        def propose_mine() -> Proposal:
            held.append(describe())
            return self._proposal(held[0])

        proposals = together(self.gather, propose_mine)
        mine = held[0]
        budget = min(proposal.budget_nbytes for proposal in proposals)
        world = world_digest(proposals, budget)
        parts = [(self.gather.rank, mine.common), *_owns(proposals)]
        alike = contents_agree(proposals)
        if self._known is not None and all(proposal.planned == world for proposal in proposals):
            known = self._known[1]
            parts = parts if alike else self._gathered(mine.common.contents(), proposals)
            return agree(self.gather, lambda: self._refreshed(known, parts)), mine
        if is_plannable_alone(proposals) and alike:
            agreed = agree(self.gather, lambda: self._alone(mine, parts, budget))
        else:
            parts = self._gathered(mine.common.tabled(self.gather.rank), proposals)
            agreed = agree(self.gather, lambda: self._together(parts, budget))
        _MEMORY.keep(self._mine, world, agreed)
        return agreed, mine

    def _proposal(self, mine: Captured) -> Proposal:
        store = open_store(self.path)
        if self.gather.size > 1 and not store.capabilities.shared:
            raise SpecError("other ranks cannot see this store", path=store.url, remedy="Save to a shared file system")
        self.shared_ok = store.capabilities.shared_chunks
        own = mine.own.tabled(self.gather.rank, mine.common_count)
        proposal = propose(mine.common, own, self.policy.replicas, self.policy.budget_nbytes)
        if proposal.is_alone and self._must_move(mine.common.shards):
            proposal = attrs.evolve(proposal, is_alone=False)
        kind = (self.gather.rank, self.gather.size, self.shared_ok, self.owned_ok)
        self._mine = (proposal.specs, proposal.shards, *kind)
        self._known = _MEMORY.find(self._mine)
        return attrs.evolve(proposal, planned=self._known[0]) if self._known else proposal

    def _must_move(self, shards: Sequence[ShardSpec]) -> bool:
        """Tell whether shards of a grid are so small that their rank must know who holds the others."""
        plans = local_array_plans(shards, self.policy.layout, self.shared_ok, self.owned_ok)
        return any(plan.layout.rung == "owned" for plan in plans)

    def _refreshed(self, known: Agreed, parts: Sequence[Part]) -> Agreed:
        """Return a plan made before with the values of now."""
        state, problems = merge_values(parts, known.state, self.policy.replicated)
        raise_problems(problems)
        return attrs.evolve(known, state=state)

    def _alone(self, mine: Captured, parts: Sequence[Part], budget: int) -> Agreed:
        """Plan this rank's part by itself."""
        policy, rank = self.policy, self.gather.rank
        state, problems = merge_states(parts, policy.replicated)
        items = placed_leaves(mine.common, parts[1:], self.gather.size, {alias.key for alias in state.aliases})
        arrays = local_array_plans(items, policy.layout, self.shared_ok, self.owned_ok)
        raise_problems([*problems, *_name_collisions(arrays)])
        plan = plan_local_save(
            rank, items, policy.layout, policy.replicas, self.shared_ok, self.owned_ok, budget, arrays
        )
        # The plan counts the shards of the items; buffers are there for tied leaves too.
        held = {leaf.key for leaf in (*mine.common.arrays, *mine.own.arrays)}
        keys = dict.fromkeys(item.key for item in items if item.key in held)  # shards of one key come in a row
        numbers = [number for key in keys for number in mine.numbers[key]]
        shard = plan.pieces.shard
        renumbered = np.where(shard >= 0, np.array([*numbers, -1], np.int64)[shard], -1)
        return Agreed(state, arrays, attrs.evolve(plan, pieces=attrs.evolve(plan.pieces, shard=renumbered)))

    def _together(self, parts: Sequence[Part], budget: int) -> Agreed:
        return plan_together(parts, self.gather.rank, self.policy, self.shared_ok, self.owned_ok, budget)

    def _gathered(self, mine: LocalState, proposals: Sequence[Proposal]) -> list[Part]:
        """Return the parts of all ranks."""
        told = together(self.gather, lambda: sealed(mine))
        known: dict[bytes, tuple[LocalState, Any]] = {}
        commons = [opened(*each, known) for each in told]
        return [*enumerate(commons), *_owns(proposals)]


def _owns(proposals: Sequence[Proposal]) -> list[Part]:
    return [(rank, proposal.own) for rank, proposal in enumerate(proposals) if proposal.own is not None]


def plan_together(
    parts: Sequence[Part], rank: int, policy: SavePolicy, shared_ok: bool, owned_ok: bool, budget_nbytes: int
) -> Agreed:
    """Plan for all ranks from their parts, tables included, and return the part of `rank`.

    Raises
    ------
    CheckpointError
        The problems of merging and of planning, all at once.
    """
    state, problems = merge_states(parts, policy.replicated)
    leaves = {id(part.arrays): part.arrays for _, part in parts}.values()
    copied = {leaf.key for each in leaves for leaf in each if leaf.is_copy}
    copied -= {leaf.key for each in leaves for leaf in each if not leaf.is_copy}
    # Stable: a rank's own part comes after what it may have in common.
    tables = [(each, part.table) for each, part in sorted(parts, key=lambda part: part[0]) if part.table is not None]
    table, conflicts = ShardTable.join([table for _, table in tables], copied, [each for each, _ in tables])
    problems = (*problems, *check_conflicts(conflicts))
    table = table.without({alias.key for alias in state.aliases})
    try:
        plan = plan_save(table, policy.layout, policy.replicas, shared_ok, owned_ok, budget_nbytes)
    except CheckpointError as error:
        raise_problems([*problems, error])
        raise
    raise_problems([*problems, *_name_collisions(plan.arrays)])
    return Agreed(state, plan.arrays, restrict(plan, rank))


def sealed(state: LocalState) -> tuple[bytes, ShardRows | None]:
    """Return what ranks may have in common as bytes, so that equal ones are unpacked and merged once."""
    table = state.table
    alike = (attrs.evolve(state, table=None), table and (table.arrays, table.replicas))
    return pickle.dumps(alike), table.rows if table else None


def opened(described: bytes, rows: ShardRows | None, known: dict[bytes, tuple[LocalState, Any]]) -> LocalState:
    """Return a state that `sealed` described; equal descriptions become one object, which `known` remembers."""
    if described not in known:
        known[described] = pickle.loads(described)  # noqa: S301 - from our own ranks, never from storage
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
