import torch

from functional_ckpt.torch.megatron.mapping import ShardedTensor
from functional_ckpt.torch.megatron.serialization import load, save

# A distributed optimizer's part of a parameter of 6 x 4: elements [5, 24) of it, and the rest on another rank.
first, rest = torch.arange(24.0).split([5, 19])
flat = ShardedTensor.from_rank_offsets_flat
save(
    {
        "mine": flat("w", first, (6, 4), flattened_range=slice(0, 5)),
        "other": flat("w", rest, (6, 4), flattened_range=slice(5, 24)),
        "step": 3,
    },
    "checkpoint",
)
# Tensor parallel over columns, one of two ranks; the other one asks for index 1.
columns = ShardedTensor.from_rank_offsets("w", torch.empty(6, 2), (1, 0, 2))
print(load({"columns": columns}, "checkpoint", validate_access_integrity=False))
