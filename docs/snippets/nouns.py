# ruff: noqa: E402 - each part of a page has the imports that it needs
# --8<-- [start:box]
from functional_ckpt import ArraySpec, Box, ShardSpec, World

rows = Box((0, 0), (2, 4))  # cells [0:2, 0:4]
columns = Box((0, 1), (3, 3))
print(rows.intersect(columns))
print(*rows.subtract(columns))
# --8<-- [end:box]

# --8<-- [start:shard]
from functional_ckpt.spec.sharding import fragments

w = ArraySpec("model.w", (4, 4), "float32")
upper = Box((0, 0), (2, 4))
shard = ShardSpec(w, upper, flat=(3, 8))  # elements 3 to 8 of the flattened box
for fragment in fragments(shard):
    print(fragment.box, "at element", fragment.run)
# --8<-- [end:shard]

# --8<-- [start:plan]
from functional_ckpt import LayoutPolicy
from functional_ckpt.plan.save import plan_save, restrict

world = World([[ShardSpec(w, Box((2 * r, 0), (2 * r + 2, 4)))] for r in range(2)])
plan = plan_save(world, LayoutPolicy(min_chunk_nbytes=0))
print(plan.arrays[0].layout)
for write in restrict(plan, rank=1).writes:
    print(f"rank {write.rank} writes {write.box}")
# --8<-- [end:plan]

# --8<-- [start:mesh]
from functional_ckpt.spec.mesh import Mesh, Sharding
from functional_ckpt.spec.placement import Replicate, Shard

mesh = Mesh((2, 2), ranks=(0, 1, 2, 3))
sharding = Sharding(mesh, (Replicate(), Shard(0)))  # two copies, each cut by rows
for part in sharding.parts(w, rank=3):
    print(part.shard.box, "copy", part.shard.replica_id)
# --8<-- [end:mesh]

# --8<-- [start:moves]
cuts = (0, 1, 3, 4)  # a row, two rows, a row; chunks are two rows
blocks = [Box((cuts[r], 0), (cuts[r + 1], 4)) for r in range(3)]
world = World([[ShardSpec(w, block)] for block in blocks])
for move in plan_save(world, LayoutPolicy(target_chunk_nbytes=32)).moves:
    row, ranks = move.box.start[0], (move.source, move.target)
    print(f"row {row} goes from rank {ranks[0]} to {ranks[1]} in wave {move.wave}")
# --8<-- [end:moves]

# --8<-- [start:manifest]
import numpy as np

import functional_ckpt

state = {"model": {"w": np.ones((4, 4), "f4")}, "step": 3}
manifest = functional_ckpt.save(state, "checkpoint")
(entry,) = manifest.arrays
print(entry.spec, entry.layout.chunk)
print(entry.digests.hex())
assert manifest == functional_ckpt.read_manifest("checkpoint")
# --8<-- [end:manifest]
