"""O: the flat shards of an optimizer's buckets tile every parameter once, and cuts of factories are merged back.

Buckets are made here as Megatron makes them, cell by cell: parameters side by side with gaps, padded at the end, one
equal slice per data parallel rank.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from functional_ckpt.errors import SpecError  # noqa: E402
from functional_ckpt.spec.sharding import World  # noqa: E402
from functional_ckpt.testing import laws  # noqa: E402
from functional_ckpt.testing import strategies as fst  # noqa: E402
from functional_ckpt.torch.megatron.distributed_optimizer import flat_parts, sharded_optimizer_state  # noqa: E402
from functional_ckpt.torch.megatron.factory import built  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from functional_ckpt.torch.megatron.state_tree import leaves_of, map_leaves  # noqa: E402

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def halves(*offsets, along=0, prepended=0, grid=(0, 1)):
    """Return the functions of a factory that stores two parts of a tensor, each cut over ranks, as SwiGLU does."""
    number, count = grid

    def build(key, tensor, replica_id, flattened_range):
        return [
            ShardedTensor.from_rank_offsets(
                f"{key}.{i}", part, *offsets, (along + prepended, number, count),
                replica_id=replica_id, prepend_axis_num=prepended,
            )
            for i, part in enumerate(torch.chunk(tensor, 2, along))
        ]  # fmt: skip

    return build, lambda loaded: torch.cat(loaded, along)


@st.composite
def parameters(draw, key, tp):
    """Parameters that share a key, one per layer: shape, whether it is cut over ranks, and how a rank describes it."""
    shape, cut, folded = draw(SHAPES), draw(st.booleans()), draw(st.booleans())
    layers = draw(st.integers(0, 2))

    def described_as(layer):
        offsets = [(0, layer, layers)] if layers else []
        prepended = len(offsets)

        def describe(parameter, rank, dp):
            grid = (rank, tp) if cut else (0, 1)
            replica_id = (0, 0 if cut else rank, dp)
            if folded:
                functions = halves(*offsets, prepended=prepended, grid=grid)
                return ShardedTensorFactory(key, parameter, *functions, replica_id=replica_id)
            return ShardedTensor.from_rank_offsets(
                key, parameter, *offsets, (prepended, *grid), replica_id=replica_id, prepend_axis_num=prepended
            )

        return shape, cut, describe

    return [described_as(layer) for layer in range(max(layers, 1))]


@st.composite
def buffers(draw, sizes, dp):
    """Return buckets: for each its length and where parameters begin in it; drawn anew for each buffer."""
    align, pad = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3]))
    buckets = [[]]
    end = 0
    for number in draw(st.permutations(range(len(sizes)))):
        start = -(-end // align) * align
        buckets[-1].append((number, start))
        end = start + sizes[number]
        if draw(st.booleans()):
            buckets[-1] = (-(-end // (dp * pad)) * dp * pad, buckets[-1])
            buckets.append([])
            end = 0
    if buckets[-1]:
        buckets[-1] = (-(-end // (dp * pad)) * dp * pad, buckets[-1])
    return [bucket for bucket in buckets if bucket]


def ranges_of(buckets, sizes, rank, dp):
    """Return number of a parameter -> range of it that lies in the rank's slice of its bucket, cell by cell."""
    found = []
    for length, members in buckets:
        cells = np.full(length, -1)
        owners = np.full(length, -1)
        for number, start in members:
            cells[start : start + sizes[number]] = range(sizes[number])
            owners[start : start + sizes[number]] = number
        mine = slice(rank * (length // dp), (rank + 1) * (length // dp))
        held = {number: cells[mine][owners[mine] == number] for number, _ in members}
        found.append({n: (int(part[0]), int(part[-1]) + 1) for n, part in held.items() if len(part)})
    return found


def optimizer(model, held, instance):
    """Return what looks like a DistributedOptimizer that holds these ranges; its moments are minus the parameters."""
    order = {model[n]: (0, i) for i, n in enumerate(n for bucket in held for n in bucket)}
    masters = [model[n].detach().reshape(-1)[start:stop] for bucket in held for n, (start, stop) in bucket.items()]
    buckets = [
        {"param_map": {model[n]: {"param": SimpleNamespace(start=a, end=b)} for n, (a, b) in bucket.items()}}
        for bucket in held
    ]
    inner = SimpleNamespace(
        param_groups=[{"params": masters}],
        state={master: {"step": torch.tensor(3.0), "exp_avg": -master} for master in masters},
    )
    return SimpleNamespace(
        optimizer=inner, gbuf_ranges=[{"dtypes": buckets}], model_param_group_index_map=order, init_state_fn=None,
        distributed_optimizer_instance_id=instance, state_dict=dict,
    )  # fmt: skip


@st.composite
def trainings(draw):
    tp, dp, instances = draw(st.tuples(*(st.integers(1, 3),) * 2, st.integers(1, 2)))
    keys = [f"p{number}" for number in range(draw(st.integers(1, 3)))]
    described = [one for key in keys for one in draw(parameters(key, tp))]
    sizes = [int(np.prod(shape)) for shape, _, _ in described]
    # Tensor parallel ranks may even lay out their buffers in different ways.
    layouts = [draw(buffers(sizes, dp)) for _ in range(tp)]
    return tp, dp, instances, described, sizes, layouts


@given(trainings())
def test_o1_main_flat_shards_tile_every_parameter_and_hold_its_elements(case):
    tp, dp, instances, described, sizes, layouts = case
    whole, ranks = {}, []
    for rank in range(tp):
        # The elements of a copied parameter are the same on all ranks.
        numbers = [1 + torch.arange(size).float() + 1000 * (rank if cut else 0)
                   for size, (_, cut, _) in zip(sizes, described, strict=True)]  # fmt: skip
        model = [torch.nn.Parameter(n.reshape(shape)) for n, (shape, _, _) in zip(numbers, described, strict=True)]
        for instance, part in np.ndindex(instances, dp):
            leaves = [d(p, rank, instance * dp + part) for p, (_, _, d) in zip(model, described, strict=True)]
            for leaf in leaves_of(built(leaves)):
                array = whole.setdefault(leaf.key, np.zeros(leaf.global_shape, "float32"))
                array[leaf.global_slice()] = leaf.data.detach()
            held = ranges_of(layouts[rank], sizes, part, dp)
            ranks.append(sharded_optimizer_state(optimizer(model, held, instance), leaves)["shards"])
    for shard in (shard for shards in ranks for shard in shards):
        _, _, name, key = shard.key.split(".", 3)
        expected = whole[key] if name == "fp32_param" else -whole[key]
        laws.check_fragments(shard.spec, shard.data.numpy(), expected)
    mains = World([[shard.spec for shard in shards if shard.spec.is_main] for shards in ranks])
    laws.check_tiles(mains)
    laws.check_main_replicas(mains)
    event(f"ranks: {len(ranks)}")


@st.composite
def cut_factories(draw):
    """A factory, and its flattened parameter cut into ranges."""
    shape = draw(SHAPES)
    data = torch.arange(int(np.prod(shape))).float().reshape(shape)
    along = draw(st.integers(0, len(shape) - 1))
    turned = (lambda key, t, *_: [ShardedTensor.from_rank_offsets(key, t.T.contiguous())], lambda loaded: loaded[0].T)
    functions = draw(st.sampled_from([halves(along=along), turned] if len(shape) == 2 else [halves(along=along)]))
    return ShardedTensorFactory("w", data, *functions), draw(fst.flat_splits(data.numel(), 4))


def side_by_side(factory, start, stop):
    """Tell whether each stored shard keeps its elements of a range in one run, in order."""
    for shard in leaves_of(factory.build()):
        values = shard.data.reshape(-1).tolist()
        run = [value for value in values if start <= value < stop]
        places = [values.index(value) for value in run]
        if [*np.diff(run), *np.diff(places)] != [1] * (2 * max(len(run) - 1, 0)):
            return False
    return True


@given(cut_factories())
@example((ShardedTensorFactory("w", torch.arange(6.0).reshape(2, 3), *halves(along=1)), [(0, 6)]))
def test_o2_the_cut_of_a_factory_is_merged_back_or_refused(case):
    factory, ranges = case
    flat = factory.data.reshape(-1)
    stored = factory.build()
    blank = map_leaves(lambda shard: torch.full(shard.local_shape, -1.0), stored)
    by_place = {(shard.key, shard.global_offset): n for n, shard in enumerate(leaves_of(stored))}
    for start, stop in ranges:
        if not side_by_side(factory, start, stop):
            event("refused")
            with pytest.raises(SpecError, match="'w"):
                flat_parts(factory, start, stop)
            return
        for part in flat_parts(factory, start, stop):
            target = list(leaves_of(blank))[by_place[part.place.key, part.place.global_offset]]
            target.reshape(-1)[part.place.flattened_range] = flat[start:stop][part.run]
    event("merged")
    assert torch.equal(factory.merge_fn(blank), factory.data)
