# ruff: noqa: E402 - each part of a page has the imports that it needs
# --8<-- [start:ladder]
from functional_ckpt import ArraySpec, Box, LayoutPolicy
from functional_ckpt.plan.layout import choose_layout

w = ArraySpec("w", (4096, 4096), "float32")  # 64 MiB
policy = LayoutPolicy()


def rows(ranks):
    step = 4096 // ranks
    return [Box((r * step, 0), ((r + 1) * step, 4096)) for r in range(ranks)]


print(choose_layout(w, rows(1), policy).chunk)  # no faces: 2 chunks of 32 MiB
print(choose_layout(w, rows(4), policy).chunk)  # 4 ranks: a chunk of 16 MiB each
print(choose_layout(w, rows(128), policy).chunk)  # 512 KiB each: cut as for 1 rank
print(choose_layout(w, rows(128), policy, owned_ok=False).chunk)  # no exchange
# --8<-- [end:ladder]

# --8<-- [start:owned]
import json

import numpy as np

import functional_ckpt
from functional_ckpt import LocalShards, SavePolicy, ShardSpec
from functional_ckpt.testing.simulate import run_ranks  # ranks as threads

values = np.arange(4096 * 64, dtype="float32").reshape(4096, 64)  # 1 MiB
b = ArraySpec("b", values.shape, "float32")
chosen = SavePolicy(layout=LayoutPolicy(target_chunk_nbytes=256 * 1024))


def save_rows(group):
    low, high = (4096 * rank // group.size for rank in (group.rank, group.rank + 1))
    shard = ShardSpec(b, Box((low, 0), (high, 64)))
    state = {"b": LocalShards(shard, values[low:high])}
    path = f"by-{group.size}"
    return functional_ckpt.save(state, path, policy=chosen, process_group=group)


one, five = (run_ranks(size, save_rows)[0].arrays[0] for size in (1, 5))
assert (one.layout.chunk, one.digests) == (five.layout.chunk, five.digests)
print(one.layout.ownership, five.layout.ownership, five.grid.size)
with open("by-5/provenance.json") as file:
    ranks = json.load(file)["ranks"]
for rank, told in enumerate(ranks):
    print(rank, "wrote", told["nbytes"], "sent", told["moved_nbytes"])
# --8<-- [end:owned]

# --8<-- [start:codecs]

layout = LayoutPolicy(codecs=(("optim.", ("zstd:3", "crc32c")), ("", ())))
state = {"model": {"w": np.ones(9)}, "optim": {"m": np.zeros(9)}}
policy = functional_ckpt.SavePolicy(layout=layout)
manifest = functional_ckpt.save(state, "checkpoint", policy=policy)
print({entry.spec.key: entry.layout.codecs for entry in manifest.arrays})
# --8<-- [end:codecs]
