"""Laws: plain functions that raise `AssertionError` when sharding, layout or planning code breaks one.

They do not use Hypothesis or pytest, and they compute what they check in the most obvious way, by counting
cells and slicing numpy arrays, never with the code under test. A law that takes only specs also works for huge
arrays: cells are counted in blocks between the edges of boxes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from functional_ckpt.plan.layout import ArrayPlan, ChunkGrid, Layout, LayoutPolicy
from functional_ckpt.plan.load import ArrayRead, Fill, LoadPlan, plan_load
from functional_ckpt.plan.manifest import ArrayEntry
from functional_ckpt.plan.save import ArrayWrite, Move, SavePlan, plan_save
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.box import Box
from functional_ckpt.spec.shard import Fragment, ShardSpec, World, fragments
from functional_ckpt.testing import model

__all__ = [
    "check_fragments",
    "check_layout",
    "check_load_plan",
    "check_main_replicas",
    "check_plan",
    "check_reshard",
    "check_tiles",
    "check_writers",
    "require",
]

Array: TypeAlias = NDArray[Any]
#: (rank, position among the rank's shards, shard)
Holder: TypeAlias = tuple[int, int, ShardSpec]
#: A world, or the shards of each rank under its number.
AnyWorld: TypeAlias = World | Mapping[int, Iterable[ShardSpec]]


def require(condition: object, message: str) -> None:
    """Raise `AssertionError` with `message` unless `condition` holds (also under ``python -O``).

    Examples
    --------
    >>> require(1 + 1 == 2, "arithmetic is broken")
    """
    if not condition:
        raise AssertionError(message)


def check_tiles(world: AnyWorld) -> None:
    """Check that ranks agree about every array and that its shards, copies aside, hold each cell exactly once.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> check_tiles({0: [ShardSpec(w, Box((0,), (3,)))], 1: [ShardSpec(w, Box((2,), (4,)))]})
    Traceback (most recent call last):
    ...
    AssertionError: 'w': cells (2,) to (3,) are held by 2 different shards, expected 1
    """
    for key, holders in _holders(world).items():
        arrays = {shard.array for _, _, shard in holders}
        require(len(arrays) == 1, f"{key!r}: ranks disagree about the array: {sorted(map(str, arrays))}")
        distinct = {shard.identity: shard for _, _, shard in holders}.values()
        boxes = [fragment.box for shard in distinct for fragment in fragments(shard)]
        _check_counts(key, arrays.pop().box, boxes, "held by", "different shards")


def check_main_replicas(world: AnyWorld) -> None:
    """Check that each shard with cells has exactly one main replica, and that copies have different ids.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> check_main_replicas({0: [ShardSpec(w, w.box, 1)], 1: [ShardSpec(w, w.box, 2)]})
    Traceback (most recent call last):
    ...
    AssertionError: 'w': the shard at (0,) has 0 main replicas, its ids are [(1,), (2,)]
    """
    for key, holders in _holders(world).items():
        ids: dict[object, list[tuple[int, ...]]] = {}
        starts = {shard.identity: shard.box.start for _, _, shard in holders if shard.size}
        for _, _, shard in holders:
            ids.setdefault(shard.identity, []).append(shard.replica_id)
        for identity, start in starts.items():
            found = sorted(ids[identity])
            mains = sum(not any(replica) for replica in found)
            text = f"{key!r}: the shard at {start} has"
            require(mains == 1, f"{text} {mains} main replicas, its ids are {found}")
            require(len({*found}) == len(found), f"{text} two copies with one replica id: {found}")


def check_fragments(shard: ShardSpec, local: Array, global_: Array) -> None:
    """Check that the fragments of `shard` are its buffer `local` in order, each equal to its box in `global_`.

    Examples
    --------
    >>> x = np.arange(6).reshape(2, 3)
    >>> shard = ShardSpec(ArraySpec("w", (2, 3), "int64"), Box((0, 1), (2, 3)), 0, (1, 3))
    >>> check_fragments(shard, np.array([2, 4]), x)
    """
    flat = local.reshape(-1)
    require(flat.size == shard.size, f"{shard.key!r}: the buffer has {flat.size} elements, not {shard.size}")
    end = 0
    for fragment in fragments(shard):
        box, run = fragment.box, fragment.run
        require(box.size, f"{shard.key!r}: fragment {fragment} is empty")
        require(run == end, f"{shard.key!r}: fragment {fragment} does not begin at element {end}")
        end = run + box.size
        same = model.bits(flat[run:end]) == model.bits(global_[box.slices])
        require(same, f"{shard.key!r}: fragment {fragment} holds other cells than its box")
    require(end == shard.size, f"{shard.key!r}: fragments end at element {end} of {shard.size}")


def check_layout(array: ArraySpec, boxes: Iterable[Box], policy: LayoutPolicy, layout: Layout) -> None:
    """Check a layout for `array` written as `boxes`: exclusive chunks have one writer, others a bounded size.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> check_layout(w, [Box((0,), (1,)), Box((1,), (4,))], LayoutPolicy(), Layout("exclusive", (2,), (), "int8"))
    Traceback (most recent call last):
    ...
    AssertionError: 'w': exclusive chunk (0,) is touched by 2 boxes
    """
    whole = array.box.shape
    require(
        len(layout.chunk) == len(whole),
        f"{array.key!r}: chunk {layout.chunk} and {whole} differ in their number of dimensions",
    )
    fits = all(1 <= c <= max(n, 1) for c, n in zip(layout.chunk, whole, strict=True))
    require(fits, f"{array.key!r}: chunk {layout.chunk} does not fit {whole}")
    nbytes = int(np.prod(layout.chunk, dtype=object)) * array.itemsize
    sizes = {"shared": policy.shared_chunk_nbytes, "owned": policy.target_chunk_nbytes}
    if layout.ownership in sizes:
        limit = max(sizes[layout.ownership], array.itemsize)
        require(nbytes <= limit, f"{array.key!r}: a chunk that is {layout.ownership} has {nbytes} bytes, over {limit}")
        return
    for index, touching in _touching(ChunkGrid(whole, layout.chunk), boxes).items():
        require(len(touching) == 1, f"{array.key!r}: exclusive chunk {index} is touched by {len(touching)} boxes")


def check_writers(holders: Sequence[Holder], writers: Sequence[Holder]) -> None:
    """Check the `writers` that a rule picks for one array: for each shard one of its holders, and no others.

    Examples
    --------
    >>> w = ArraySpec("w", (2,), "int8")
    >>> copies = [(rank, 0, ShardSpec(w, w.box, rank)) for rank in range(2)]
    >>> check_writers(copies, copies)
    Traceback (most recent call last):
    ...
    AssertionError: 'w': the shard at (0,) has 2 writers
    """
    shards = {shard.identity: shard for _, _, shard in holders if shard.size}
    for writer in writers:
        require(writer in holders, f"{writer[2].key!r}: rank {writer[0]} writes what it does not hold")
    for identity, shard in shards.items():
        count = sum(writer[2].identity == identity for writer in writers)
        require(count == 1, f"{shard.key!r}: the shard at {shard.box.start} has {count} writers")


def check_plan(plan: SavePlan, world: AnyWorld) -> None:
    """Check that `plan` writes every cell of every array of `world` once, from a rank that holds it.

    Also: one header per array, no exclusive chunk with two writers, a digest for exactly the chunks that are written
    in several pieces, by a rank that writes to the chunk, and for each chunk that pieces move to one owner, which holds
    a largest piece.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> world = World(((ShardSpec(w, w.box),),))
    >>> check_plan(plan_save(world, LayoutPolicy()), world)
    """
    holders = _holders(world)
    keys = [array.spec.key for array in plan.arrays]
    require(keys == list(holders), f"the plan has arrays {keys}, the world {list(holders)}")
    require([h.key for h in plan.headers] == keys, f"headers {plan.headers} are not one per array of {keys}")
    for array, header in zip(plan.arrays, plan.headers, strict=True):
        key = array.spec.key
        ranks = {rank for rank, _, _ in holders[key]}
        require(header.rank in ranks, f"{key!r}: rank {header.rank} writes the header and does not hold the array")
        require(array.spec == holders[key][0][2].array, f"{key!r}: the plan has another array: {array.spec}")
        writes = [write for write in plan.writes if write.key == key]
        moves = [move for move in plan.moves if move.key == key]
        boxes = [write.box for write in writes] + [move.box for move in moves]
        _check_counts(key, array.spec.box, boxes, "written", "times")
        known = {(rank, at, f) for rank, at, shard in holders[key] for f in fragments(shard)}
        for write in writes:
            place = (write.rank, write.shard, Fragment(write.box, write.run))
            require(place in known, f"{key!r}: {write} is not a fragment that its rank holds")
        for move in moves:
            require((move.source, move.shard, move.fragment) in known, f"{key!r}: {move} is not of what its rank holds")
        _check_owners(array, moves)
        _check_digests(array, writes, plan)


def _check_owners(array: ArrayPlan, moves: Sequence[Move]) -> None:
    key, chunks = array.spec.key, {move.index: [m for m in moves if m.index == move.index] for move in moves}
    require(
        not moves or array.layout.ownership == "owned",
        f"{key!r}: pieces move, on the ownership {array.layout.ownership}",
    )
    for index, pieces in chunks.items():
        inside = all(array.grid.box(index).contains(move.box) for move in pieces)
        require(inside, f"{key!r}: pieces of chunk {index} leave it")
        require(len({(m.target, m.wave) for m in pieces}) == 1, f"{key!r}: chunk {index} has two owners or waves")
        largest = max(move.box.size for move in pieces)
        rivals = {move.source for move in pieces if move.box.size == largest}
        require(pieces[0].target in rivals, f"{key!r}: the owner of chunk {index} is none of {sorted(rivals)}")


def _check_digests(array: ArrayPlan, writes: Sequence[ArrayWrite], plan: SavePlan) -> None:
    key = array.spec.key
    touching = _touching(array.grid, [write.box for write in writes])
    several = {index: {writes[i].rank for i in found} for index, found in touching.items() if len(found) > 1}
    require(not several or array.layout.ownership == "shared", f"{key!r}: chunks with two writers: {several}")
    digests = [digest for digest in plan.digests if digest.key == key]
    indices = sorted(digest.index for digest in digests)
    require(indices == sorted(several), f"{key!r}: digested are {indices}, in pieces {sorted(several)}")
    for digest in digests:
        require(digest.rank in several[digest.index], f"{key!r}: {digest} is by a rank that does not write there")


def check_load_plan(plan: LoadPlan, stored: Mapping[str, ArrayEntry], wanted: Sequence[ShardSpec]) -> None:
    """Check that reads and fills of `plan` cover every wanted cell once: reads what is stored, fills the rest.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> stored = {"w": ArrayEntry(w, Layout("exclusive", (4,), (), "int8"), bytes(16))}
    >>> check_load_plan(plan_load(stored, [ShardSpec(w, w.box)]), stored, [ShardSpec(w, w.box)])
    """
    steps: list[tuple[ArrayRead | Fill, bool]] = [(read, True) for read in plan.reads]
    steps += [(fill, False) for fill in plan.fills]
    for step, is_read in steps:
        whole = stored[step.key].spec.box
        require(step.box.size and step.target.box.contains(step.box), f"{step} leaves its fragment")
        inside = whole.contains(step.box) if is_read else whole.intersect(step.box) is None
        require(inside, f"{step} is on the wrong side of the stored {whole}")
    for position, shard in enumerate(wanted):
        mine = [step for step, _ in steps if step.shard == position]
        require(all(step.key == shard.key for step in mine), f"a step for {shard.key!r} has another key: {mine}")
        for fragment in fragments(shard):
            boxes = [step.box for step in mine if step.target == fragment]
            _check_counts(shard.key, fragment.box, boxes, "read or filled", "times")
        strays = [step for step in mine if step.target not in fragments(shard)]
        require(not strays, f"{shard.key!r}: steps that go to no fragment: {strays}")


def check_reshard(
    source: World,
    target: World,
    arrays: Mapping[str, Array],
    policy: LayoutPolicy | None = None,
    owned_ok: bool = True,
) -> None:
    """Check that what `source` saves is what `target` loads, bit for bit, by moving cells as the plans say.

    No storage is involved: arrays are numpy arrays that start out wrong everywhere.

    Examples
    --------
    >>> w = ArraySpec("w", (4,), "int8")
    >>> rows = World([[ShardSpec(w, Box((i,), (i + 1,)))] for i in range(4)])
    >>> check_reshard(rows, World([[ShardSpec(w, w.box)]]), {"w": np.arange(4, dtype="int8")})
    """
    plan = plan_save(source, policy or LayoutPolicy(), owned_ok=owned_ok)
    buffers = model.deal(source, arrays)
    stored = {key: _inverted(array) for key, array in arrays.items()}
    for write in plan.writes:
        fragment = _fragment(buffers[write.rank][write.shard], Fragment(write.box, write.run))
        stored[write.key][write.box.slices] = fragment
    for move in plan.moves:
        require(move.shard is not None and move.fragment is not None, f"{move} lacks its source")
        if move.shard is not None and move.fragment is not None:
            part = _fragment(buffers[move.source][move.shard], move.fragment)
            stored[move.key][move.box.slices] = part[move.box.relative_to(move.fragment.box).slices]
    entries = {a.spec.key: ArrayEntry(a.spec, a.layout, bytes(16 * a.grid.size)) for a in plan.arrays}
    for rank, wanted in enumerate(target.ranks):
        loads = plan_load(entries, wanted)
        filled = [_inverted(model.view(shard, arrays[shard.key])) for shard in wanted]
        for read in loads.reads:
            part = _fragment(filled[read.shard], read.target)
            part[read.box.relative_to(read.target.box).slices] = stored[read.key][read.box.slices]
        for shard, local in zip(wanted, filled, strict=True):
            same = model.bits(local) == model.bits(model.view(shard, arrays[shard.key]))
            require(same, f"{shard.key!r}: rank {rank} loads other bits than were saved, at {shard.box.start}")


def _fragment(buffer: Array, fragment: Fragment) -> Array:
    """Return a fragment of a C-order buffer as a view."""
    flat = buffer.reshape(-1)[fragment.run : fragment.run + fragment.box.size]
    return flat.reshape(fragment.box.shape)


def _inverted(array: Array) -> Array:
    """Return a new array that differs from `array` in every cell."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return (flat ^ 1).view(array.dtype).reshape(array.shape)


def _holders(world: AnyWorld) -> dict[str, list[Holder]]:
    ranks = dict(enumerate(world.ranks)) if isinstance(world, World) else world
    found: dict[str, list[Holder]] = {}
    for rank, shards in sorted(ranks.items()):
        for position, shard in enumerate(shards):
            found.setdefault(shard.key, []).append((rank, position, shard))
    return dict(sorted(found.items()))


def _touching(grid: ChunkGrid, boxes: Iterable[Box]) -> dict[tuple[int, ...], list[int]]:
    """Return the numbers of the boxes that share a cell with each chunk, by index; untouched chunks are absent."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, box in enumerate(boxes):
        if box.size:
            first = [lo // c for lo, c in zip(box.start, grid.chunk, strict=True)]
            last = [(hi - 1) // c for hi, c in zip(box.stop, grid.chunk, strict=True)]
            spans = [range(lo, hi + 1) for lo, hi in zip(first, last, strict=True)]
            for index in np.ndindex(*(len(span) for span in spans)):
                chunk = tuple(span[i] for span, i in zip(spans, index, strict=True))
                found.setdefault(chunk, []).append(number)
    return found


def _check_counts(key: str, whole: Box, boxes: Sequence[Box], verb: str, noun: str) -> None:
    """Check that each cell of `whole` lies in one box, by counting blocks between the edges of all boxes."""
    for box in boxes:
        require(whole.contains(box), f"{key!r}: {box} is not within {whole}")
    moved = [box.relative_to(whole) for box in boxes if box.size]
    edges = model.edges(whole.shape, moved)
    blocks = np.zeros(tuple(len(places) - 1 for places in edges), np.int64)
    for box in moved:
        span = zip(edges, box.start, box.stop, strict=True)
        blocks[tuple(slice(places.index(lo), places.index(hi)) for places, lo, hi in span)] += 1
    wrong = np.argwhere(blocks != 1)
    if wrong.size or (not blocks.ndim and blocks != 1):
        at = tuple(map(int, wrong[0])) if blocks.ndim else ()
        low = tuple(places[i] + o for places, i, o in zip(edges, at, whole.start, strict=True))
        high = tuple(places[i + 1] + o for places, i, o in zip(edges, at, whole.start, strict=True))
        raise AssertionError(f"{key!r}: cells {low} to {high} are {verb} {blocks[at]} {noun}, expected 1")
