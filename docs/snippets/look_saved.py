import numpy as np

import functional_ckpt

state = {
    "model": {"w": np.arange(48, dtype="float32").reshape(8, 6), "b": np.zeros(6, "float16")},
    "optim": {"lr": 1e-3, "betas": (0.9, 0.999)},
    "step": 100,
}
functional_ckpt.save(state, "checkpoint", attributes={"run": "first"})
