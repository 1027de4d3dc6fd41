# ruff: noqa: E402 - each part of a page has the imports that it needs
# --8<-- [start:save]
import numpy as np

import functional_ckpt
from functional_ckpt import LoadPolicy, Strict

w = np.arange(48, dtype="float32").reshape(8, 6)
state = {"model": {"w": w, "b": np.ones(6, "float32")}, "step": 3}
functional_ckpt.save(state, "checkpoint")
# --8<-- [end:save]

# --8<-- [start:part]
from functional_ckpt.spec.sharding import from_rank_offsets

# Axis 1 is cut into 2 equal parts; this is part 1: an (8, 3) shard of an (8, 6) array.
right_half = from_rank_offsets("model.w", "float32", (8, 3), (1, 1, 2))
like = {"model": {"w": right_half}}
part = functional_ckpt.load(like, "checkpoint", policy=LoadPolicy(keys="model.w"))
assert np.array_equal(part["model"]["w"], w[:, 3:])
# --8<-- [end:part]

# --8<-- [start:keys]
# Only the model, under another name, in another precision; other stored keys are no error.
like = {"net": {"w": np.empty((8, 6), "float64"), "b": np.empty(6)}}
strict = Strict(unexpected="ignore")
policy = LoadPolicy(rename={"net": "model"}, cast="same_kind", strict=strict)
loaded = functional_ckpt.load(like, "checkpoint", policy=policy)
assert loaded["net"]["w"][7, 5] == 47.0
# --8<-- [end:keys]

# --8<-- [start:shape]
# A larger vocabulary: the old rows keep their place, the new ones are zero.
policy = LoadPolicy(keys="model.w", allow_shape_mismatch=True)
like = {"model": {"w": np.empty((10, 6), "float32")}}
loaded = functional_ckpt.load(like, "checkpoint", policy=policy)
assert np.array_equal(loaded["model"]["w"][:8], w)
assert not loaded["model"]["w"][8:].any()
# --8<-- [end:shape]

# --8<-- [start:problems]
try:
    like = {"model": {"w": np.empty((8, 6), "int32"), "b": np.empty((5,), "float32")}}
    functional_ckpt.load(like, "checkpoint", policy=LoadPolicy(keys="model"))
except functional_ckpt.errors.CheckpointError as error:
    print(error)
# --8<-- [end:problems]
