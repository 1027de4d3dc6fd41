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
print(choose_layout(w, rows(64), policy).rung)  # 64 ranks: 1 MiB each is too small, pieces move
# --8<-- [end:ladder]

# --8<-- [start:codecs]
import numpy as np

import functional_ckpt

layout = LayoutPolicy(codecs=(("optim.", ("zstd:3", "crc32c")), ("", ())))
state = {"model": {"w": np.ones(9)}, "optim": {"m": np.zeros(9)}}
policy = functional_ckpt.SavePolicy(layout=layout)
manifest = functional_ckpt.save(state, "checkpoint", policy=policy)
print({entry.spec.key: entry.layout.codecs for entry in manifest.arrays})
# --8<-- [end:codecs]
