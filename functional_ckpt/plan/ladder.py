"""The layout ladder: the chunk grid of every array of a checkpoint.

1. *exclusive*: per axis, the greatest common divisor of the interior faces of all boxes gives the largest
   grid in which no chunk has two writers; it is then split toward the target size. Taken when its chunks
   reach the minimum size, or when one box is the whole array.
2. *owned*: chunks of a size that suits storage; one rank writes each, the others send it their pieces. Taken
   where ranks can exchange data.
3. *shared*: small chunks that several ranks write in part, by an atomic read-modify-write. Taken where ranks cannot
   exchange data and the store supports it.

In a checkpoint that would have too many files the smallest exclusive chunks are joined with their neighbours to owned
ones, and no more of them than it takes. The smallest come first: to have one file less, ranks send as many bytes as it
has.

The choice depends on boxes, data types and the policy, not on ranks or their order.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import gcd, prod
from typing import TypeAlias

from functional_ckpt.errors import LayoutError
from functional_ckpt.plan.layout import ArrayPlan, Layout, LayoutPolicy, subdivide
from functional_ckpt.spec.array import BITS, ArraySpec
from functional_ckpt.spec.box import Box

__all__ = ["array_plans", "choose_layout", "exclusive_chunk", "layout_of_faces", "least_kept_nbytes"]

#: Shape, bytes of an element and faces of an array.
Cut: TypeAlias = tuple[tuple[int, ...], int, tuple[int, ...]]


def choose_layout(
    array: ArraySpec, boxes: Iterable[Box], policy: LayoutPolicy, shared_ok: bool = True, owned_ok: bool = True
) -> Layout:
    """Return the layout of a checkpoint's only `array` whose `boxes` (fragments of its writers) are written.

    `owned_ok`: ranks can exchange data. `shared_ok`: the store updates part of a chunk atomically.

    Raises
    ------
    LayoutError
        If chunks with one writer would be smaller than the minimum, and chunks with several writers are impossible.

    Examples
    --------
    >>> w = ArraySpec("w", (8, 4), "float32")
    >>> choose_layout(w, [Box((0, 0), (4, 4)), Box((4, 0), (8, 4))], LayoutPolicy(min_chunk_nbytes=0)).chunk
    (4, 4)
    """
    chunk, faced = exclusive_chunk(array.shape, boxes)
    faces = tuple(extent if has_faces else 0 for extent, has_faces in zip(chunk, faced, strict=True))
    least = least_kept_nbytes({(array.shape, array.itemsize, faces): 1}, policy) if owned_ok else 0
    return layout_of_faces(array, faces, policy, shared_ok, owned_ok, least)


def array_plans(
    arrays: Sequence[ArraySpec],
    faces: Iterable[Sequence[int]],
    policy: LayoutPolicy,
    shared_ok: bool = True,
    owned_ok: bool = True,
) -> tuple[tuple[ArrayPlan, ...], tuple[LayoutError, ...]]:
    """Return the layouts of all arrays of a checkpoint, and a problem for each that has none.

    `faces` are those of `layout_of_faces`. Arrays that differ only in their keys share one layout (optimizer states
    have thousands).

    Examples
    --------
    >>> w, b = (ArraySpec(key, (rows, 2**20), "int8") for key, rows in (("w", 64), ("b", 16)))
    >>> faces = [(4, 0), (1, 0)]  # 16 ranks: 4 MiB and 1 MiB on each
    >>> [[p.layout.chunk[0] for p in array_plans([w, b], faces, LayoutPolicy(few_files=n))[0]] for n in (34, 20, 0)]
    [[4, 1], [4, 16], [32, 16]]
    """
    cuts: list[Cut] = [(spec.shape, spec.itemsize, tuple(cut)) for spec, cut in zip(arrays, faces, strict=True)]
    least = least_kept_nbytes(Counter(cuts), policy) if owned_ok else 0
    known: dict[object, Layout] = {}
    plans: list[ArrayPlan] = []
    problems: list[LayoutError] = []
    for spec, cut in zip(arrays, cuts, strict=True):
        kind = (cut, spec.dtype, policy.codecs_of(spec.key))
        try:
            if kind not in known:
                known[kind] = layout_of_faces(spec, cut[-1], policy, shared_ok, owned_ok, least)
            plans.append(ArrayPlan(spec, known[kind]))
        except LayoutError as error:
            problems.append(error)
    return tuple(plans), tuple(problems)


def least_kept_nbytes(cuts: Mapping[Cut, int], policy: LayoutPolicy) -> int:
    """Return the size below which exclusive chunks are joined, 0 for none; `cuts` has the number of arrays of each cut.

    It is the smallest that leaves at most `few_files` files, or two for each target of bytes and two for each array.
    Half the target always does.

    Examples
    --------
    >>> least_kept_nbytes({((64, 2**20), 1, (4, 0)): 1, ((16, 2**20), 1, (1, 0)): 1}, LayoutPolicy(few_files=20))
    1048577
    """
    nbytes = sum(prod(shape) * itemsize * arrays for (shape, itemsize, _), arrays in cuts.items())
    bound = 2 * nbytes // policy.target_chunk_nbytes + 2 * sum(cuts.values())
    most = max(policy.few_files, bound)
    kept = {cut: _count(cut[0], _grid(cut, policy)[1]) for cut in cuts}
    files = sum((1 + kept[cut]) * arrays for cut, arrays in cuts.items())
    least = 0
    sizes = {cut: prod(cut[0]) * cut[1] // count for cut, count in kept.items() if count}
    for size, alike in groupby(sorted(sizes, key=sizes.__getitem__), sizes.__getitem__):
        if files <= most:
            break
        least = size + 1
        files += sum((_count(cut[0], _grid(cut, policy, least)[1]) - kept[cut]) * cuts[cut] for cut in alike)
    return least


def layout_of_faces(
    array: ArraySpec,
    faces: Sequence[int],
    policy: LayoutPolicy,
    shared_ok: bool = True,
    owned_ok: bool = True,
    least_kept: int = 0,
) -> Layout:
    """Return the layout from `faces`: per axis the common divisor of all interior faces of boxes, 0 for none.

    Exclusive chunks of less than `least_kept` bytes, on the average, are joined.

    Examples
    --------
    >>> w = ArraySpec("w", (8, 4), "float32")
    >>> layout_of_faces(w, (1, 0), LayoutPolicy()).ownership, layout_of_faces(w, (0, 0), LayoutPolicy()).ownership
    ('owned', 'exclusive')
    """
    stored = BITS.get(array.dtype, array.dtype) if policy.extended_dtypes == "bits" else array.dtype
    codecs = policy.codecs_of(array.key)
    ownership, chunk = _grid((array.shape, array.itemsize, tuple(faces)), policy, least_kept)
    if ownership == "exclusive" or owned_ok:
        return Layout(ownership, chunk, codecs, stored)
    whole = _positive(array.shape)
    if not shared_ok:
        shard = tuple(face or n for face, n in zip(faces, whole, strict=True))
        raise LayoutError(
            "shards are too small to be chunks, ranks cannot exchange data and the store cannot update part of a chunk",
            array.key,
            shape=array.shape,
            expected=f"chunks of at least {policy.min_chunk_nbytes} bytes",
            found=f"{prod(shard) * array.itemsize} bytes for {shard}",
            remedy="Pass a process group that can exchange data, or LayoutPolicy(min_chunk_nbytes=0)",
        )
    return Layout("shared", _free(whole, array.itemsize, policy.shared_chunk_nbytes), codecs, stored)


def exclusive_chunk(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return the largest chunk that no two of `boxes` share, and which axes have interior faces.

    Examples
    --------
    >>> exclusive_chunk((12, 5), [Box((0, 0), (4, 5)), Box((4, 0), (10, 5)), Box((10, 0), (12, 5))])
    ((2, 5), (True, False))
    """
    common = [0] * len(shape)
    for box in boxes:
        if box.size == 0:
            continue
        for axis, (lo, hi, n) in enumerate(zip(box.start, box.stop, shape, strict=True)):
            common[axis] = gcd(common[axis], lo, hi if hi < n else 0)
    chunk = tuple(g or max(n, 1) for g, n in zip(common, shape, strict=True))
    return chunk, tuple(g > 0 for g in common)


def _grid(cut: Cut, policy: LayoutPolicy, least: int = 0) -> tuple[str, tuple[int, ...]]:
    """Return ownership, exclusive or owned, and chunk of an array."""
    shape, itemsize, faces = cut
    nbytes, whole, target = prod(shape) * itemsize, _positive(shape), policy.target_chunk_nbytes
    shard = tuple(face or n for face, n in zip(faces, whole, strict=True))
    if not any(faces):
        return "exclusive", _free(whole, itemsize, target)
    if prod(shard) * itemsize >= policy.min_chunk_nbytes:
        faced = tuple(face > 0 for face in faces)
        kept = subdivide(shard, faced, itemsize, target, policy.min_chunk_nbytes)
        if nbytes >= least * _count(shape, kept):
            return "exclusive", kept
        half = -(-target // 2)
        joined = _joined(shard, whole, itemsize, target)
        chunk = subdivide(joined, faced, itemsize, target, half) if joined == shard else joined
        # Where the array ends within a shard, the chunks at that end may hold little.
        if (_count(shape, chunk) - 1) * half <= nbytes:
            return "exclusive" if joined == shard else "owned", chunk
    return "owned", _free(whole, itemsize, target)


def _joined(shard: tuple[int, ...], whole: tuple[int, ...], itemsize: int, target_nbytes: int) -> tuple[int, ...]:
    """Return a chunk of as many neighbours of `shard` as the target takes."""
    shards = tuple(-(-n // extent) for n, extent in zip(whole, shard, strict=True))
    together = _free(shards, prod(shard) * itemsize, target_nbytes)
    return tuple(min(n, extent * k) for n, extent, k in zip(whole, shard, together, strict=True))


def _free(whole: tuple[int, ...], itemsize: int, target_nbytes: int) -> tuple[int, ...]:
    """Return the chunk of an array that is cut without regard to shards."""
    return subdivide(whole, (False,) * len(whole), itemsize, target_nbytes, 0)


def _count(shape: Sequence[int], chunk: Sequence[int]) -> int:
    return prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def _positive(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(n, 1) for n in shape)
