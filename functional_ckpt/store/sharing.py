"""Memory to load into in which two elements of the state share bytes: the problems that this can cause."""

from collections.abc import Hashable, Iterator, Mapping, Sequence

import attrs
import numpy as np

from functional_ckpt.errors import SpecError, raise_problems
from functional_ckpt.plan.load import plan_load
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.spec.shard import ShardSpec
from functional_ckpt.spec.strided import View, clusters, overlapping
from functional_ckpt.store.base import Store
from functional_ckpt.store.buffer import WHOLE, Buffer, HostBuffer
from functional_ckpt.store.encoding import as_bytes, numpy_dtype
from functional_ckpt.store.fill import read_plan

__all__ = ["Memory"]

_REMEDY = "Pass copies, or save tied tensors as one view of their memory"


@attrs.frozen(eq=False)
class Memory:
    """The buffers that shards are loaded into; `shared` are the pairs that share elements, the later buffer first.

    Examples
    --------
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> spec, values = ArraySpec("w", (4,), "int8"), np.zeros(4, "i1")
    >>> Memory.of([ShardSpec(spec, spec.box)] * 2, [HostBuffer(values), HostBuffer(values[::-1])], {}).shared
    ((1, 0),)
    """

    shards: Sequence[ShardSpec]
    buffers: Sequence[Buffer]
    shared: tuple[tuple[int, int], ...]
    problems: tuple[SpecError, ...]

    @classmethod
    def of(cls, shards: Sequence[ShardSpec], buffers: Sequence[Buffer], stored: Mapping[str, ArrayEntry]) -> "Memory":
        """Inspect all buffers; a view that holds an element twice is a problem: it cannot hold two stored elements."""
        problems: list[SpecError] = []
        spaces: dict[Hashable, dict[int, View | range]] = {}
        for position, buffer in enumerate(buffers):
            space, view = buffer.memory()
            if isinstance(view, View) and view.overlaps_itself:
                what = "a tensor to load into holds an element of memory twice"
                problems.append(_problem(what, shards[position], "Pass a contiguous copy"))
                continue
            spaces.setdefault(space, {})[position] = view
        shared = [pair for views in spaces.values() for pair in _sharing(views, shards, stored)]
        return cls(shards, buffers, tuple(sorted(shared)), tuple(problems))

    def budget(self, nbytes: int) -> int:
        """Return the budget to read with; if memory is shared, one so small that pieces are read one after the other.

        So no piece is compared with its digest while another piece overwrites it.
        """
        return 1 if self.shared else nbytes

    def check(self, stored: Mapping[str, ArrayEntry], store: Store, cast: str, reshape: bool, budget: int) -> None:
        """After a load, compare buffers that share memory with the stored elements, which are read again.

        Raises
        ------
        SpecError
            If a buffer holds something else: the elements stored for the two buffers contradict each other.
        """

        def differs(position: int) -> bool:
            shard = self.shards[position]
            alone = HostBuffer(np.empty(shard.data_shape, numpy_dtype(shard.array.dtype)))
            read_plan(plan_load(stored, [shard], cast, reshape), [alone], store, budget, "none")
            return as_bytes(alone.array) != as_bytes(self.buffers[position].get(shard.data_shape, 0, WHOLE))

        wrong = {position: differs(position) for pair in self.shared for position in pair}
        raise_problems(
            _problem(
                f"memory is shared with {self.shards[early].key!r} at {self.shards[early].box.start}, "
                "and different elements are stored for the two",
                self.shards[late],
                _REMEDY,
            )
            for late, early in self.shared
            if wrong[late] or wrong[early]
        )


def _sharing(
    views: Mapping[int, View | range], shards: Sequence[ShardSpec], stored: Mapping[str, ArrayEntry]
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of positions whose views share a byte, unless they are one view of the same elements."""
    positions = list(views)
    for near in clusters(list(views.values())):
        first: dict[View, int] = {}
        for position in (positions[number] for number in near):
            early = first.setdefault(View.of(views[position]), position)
            if early != position and not _is_alike(shards[early], shards[position], stored):
                yield position, early
        alone = list(first.values())
        yield from ((alone[late], alone[early]) for late, early in overlapping(list(first)))


def _is_alike(one: ShardSpec, other: ShardSpec, stored: Mapping[str, ArrayEntry]) -> bool:
    """Tell whether the same elements are stored for two shards."""
    a, b = stored.get(one.key), stored.get(other.key)
    if a is None or b is None or (one.array.dtype, one.box, one.flat) != (other.array.dtype, other.box, other.flat):
        return False
    return (a.spec.shape, a.spec.dtype, a.layout, a.digests) == (b.spec.shape, b.spec.dtype, b.layout, b.digests)


def _problem(what: str, shard: ShardSpec, remedy: str) -> SpecError:
    return SpecError(what, shard.key, shape=shard.array.shape, offset=shard.box.start, remedy=remedy)
