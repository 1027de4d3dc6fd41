"""The layout ladder: the chunk grid of every array of a checkpoint.

1. *exclusive*: per axis, the greatest common divisor of the interior faces of all boxes gives the largest
   grid in which no chunk has two writers; it is then split toward the target size. Taken when its chunks
   reach the minimum size, or when one box is the whole array.
2. *owned*: chunks of a size that suits storage; one rank writes each, the others send it their pieces. Taken
   where ranks can exchange data.
3. *shared*: small chunks that several ranks write in part, by an atomic read-modify-write. Taken where ranks cannot
   exchange data and the store supports it.

A checkpoint whose exclusive chunks would be too many files joins neighbouring ones to owned chunks, no larger than it
takes: what is joined has to move between ranks.

The choice depends on boxes, data types and the policy, not on ranks or their order.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import TypeAlias

from functional_ckpt.errors import LayoutError
from functional_ckpt.plan.layout import ArrayPlan, Layout, LayoutPolicy, subdivide
from functional_ckpt.spec.array import BITS, ArraySpec
from functional_ckpt.spec.box import Box

__all__ = ["array_plans", "choose_layout", "exclusive_chunk", "layout_of_faces", "least_joined_nbytes"]

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
    least = least_joined_nbytes({(array.shape, array.itemsize, faces): 1}, policy) if owned_ok else 0
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
    >>> w = ArraySpec("w", (64, 2**18), "int8")  # 16 MiB, on 16 ranks
    >>> [array_plans([w], [(4, 0)], LayoutPolicy(few_files=n))[0][0].layout.chunk[0] for n in (17, 9, 0)]
    [4, 8, 64]
    """
    cuts: list[Cut] = [(spec.shape, spec.itemsize, tuple(cut)) for spec, cut in zip(arrays, faces, strict=True)]
    least = least_joined_nbytes(Counter(cuts), policy) if owned_ok else 0
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


def least_joined_nbytes(cuts: "Counter[Cut] | dict[Cut, int]", policy: LayoutPolicy) -> int:
    """Return the size below which exclusive chunks are joined, 0 for none, of a checkpoint that has so many arrays.

    Of the sizes 0, twice the minimum, four times, ..., half the target it is the first that leaves `few_files` files at
    most, or two for each target of bytes and two for each array. The last one always does.

    Examples
    --------
    >>> least_joined_nbytes({((64, 2**18), 1, (4, 0)): 1}, LayoutPolicy(few_files=9)) // 2**20
    2
    """
    nbytes = sum(prod(shape) * itemsize * arrays for (shape, itemsize, _), arrays in cuts.items())
    bound = 2 * nbytes // policy.target_chunk_nbytes + 2 * sum(cuts.values())
    most = max(policy.few_files, bound)
    half = max(policy.min_chunk_nbytes, -(-policy.target_chunk_nbytes // 2))
    sizes, size = [0], max(2 * policy.min_chunk_nbytes, 1)
    while size < half:
        sizes.append(size)
        size *= 2
    sizes.append(half)

    def suffices(least: int) -> bool:
        return sum((1 + _count(cut[0], _grid(cut, policy, least)[1])) * n for cut, n in cuts.items()) <= most

    return sizes[bisect_left(sizes, True, hi=len(sizes) - 1, key=suffices)]


def layout_of_faces(
    array: ArraySpec,
    faces: Sequence[int],
    policy: LayoutPolicy,
    shared_ok: bool = True,
    owned_ok: bool = True,
    least_joined: int = 0,
) -> Layout:
    """Return the layout from `faces`: per axis the common divisor of all interior faces of boxes, 0 for none.

    Exclusive chunks smaller than `least_joined` bytes are joined.

    Examples
    --------
    >>> w = ArraySpec("w", (8, 4), "float32")
    >>> layout_of_faces(w, (1, 0), LayoutPolicy()).ownership, layout_of_faces(w, (0, 0), LayoutPolicy()).ownership
    ('owned', 'exclusive')
    """
    stored = BITS.get(array.dtype, array.dtype) if policy.extended_dtypes == "bits" else array.dtype
    codecs = policy.codecs_of(array.key)
    ownership, chunk = _grid((array.shape, array.itemsize, tuple(faces)), policy, least_joined)
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


def _grid(cut: Cut, policy: LayoutPolicy, least: int) -> tuple[str, tuple[int, ...]]:
    """Return ownership, exclusive or owned, and chunk of an array."""
    shape, itemsize, faces = cut
    whole, target = _positive(shape), policy.target_chunk_nbytes
    if not any(faces):
        return "exclusive", _free(whole, itemsize, target)
    shard = tuple(face or n for face, n in zip(faces, whole, strict=True))
    if prod(shard) * itemsize >= policy.min_chunk_nbytes:
        joined = _joined(shard, whole, itemsize, least)
        faced = tuple(face > 0 for face in faces)
        chunk = subdivide(joined, faced, itemsize, target, max(policy.min_chunk_nbytes, least))
        # Where the array ends within chunks of several axes, they may be small on the average.
        if not least or (_count(shape, chunk) - 1) * least <= prod(shape) * itemsize:
            return "exclusive" if joined == shard else "owned", chunk
    return "owned", _free(whole, itemsize, target)


def _joined(shard: tuple[int, ...], whole: tuple[int, ...], itemsize: int, least: int) -> tuple[int, ...]:
    """Return as many neighbours of `shard` as reach `least` bytes, along the leading axes: less than twice as much."""
    joined = list(shard)
    for axis, (extent, n) in enumerate(zip(shard, whole, strict=True)):
        nbytes = prod(joined) * itemsize
        joined[axis] = min(n, extent * max(1, -(-least // nbytes)))
    return tuple(joined)


def _free(whole: tuple[int, ...], itemsize: int, target_nbytes: int) -> tuple[int, ...]:
    """Return the chunk of an array that is cut without regard to shards."""
    return subdivide(whole, (False,) * len(whole), itemsize, target_nbytes, 0)


def _count(shape: Sequence[int], chunk: Sequence[int]) -> int:
    return prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def _positive(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(n, 1) for n in shape)
