# --8<-- [start:save]
import numpy as np

import functional_ckpt
from functional_ckpt import LoadPolicy, PerRank

loader = {"epoch": 2, "position": 1700, "order": np.arange(4)}
functional_ckpt.save({"loader": PerRank(loader)}, "checkpoint")
# --8<-- [end:save]


# --8<-- [start:load]
# `values` are those of all ranks that saved; each of `size` ranks makes its own of them.
def deal(values, rank, size):
    return values[rank % len(values)]


like = {"loader": PerRank({"epoch": 0, "position": 0, "order": np.empty(4, int)})}
state = functional_ckpt.load(like, "checkpoint", policy=LoadPolicy(per_rank=deal))
print(state["loader"].value["position"])
# --8<-- [end:load]
