# --8<-- [start:save]
import numpy as np

import functional_ckpt

state = {
    "model": {"w": np.arange(12, dtype="float32").reshape(3, 4)},
    "optim": {"lr": 1e-3, "betas": (0.9, 0.999)},
    "step": 100,
}
functional_ckpt.save(state, "checkpoint", attributes={"run": "first"})
# --8<-- [end:save]

# --8<-- [start:load]
like = {
    "model": {"w": np.empty((3, 4), "float32")},  # filled in place
    "optim": {"lr": None, "betas": None},  # values are replaced
    "step": None,
}
state = functional_ckpt.load(like, "checkpoint")
print(state["model"]["w"][1], state["optim"]["betas"], state["step"])
# --8<-- [end:load]

# --8<-- [start:open]
checkpoint = functional_ckpt.open_checkpoint("checkpoint")
print(list(checkpoint), checkpoint["model.w"].shape, checkpoint.attributes["run"])
print(checkpoint["model.w"][:2, ::2])  # reads only the chunks that hold these cells
everything = checkpoint.state()  # the nested state, whole arrays
print(everything["optim"])
# --8<-- [end:open]
assert everything["model"]["w"][2, 3] == 11
