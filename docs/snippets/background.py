# --8<-- [start:save]
import numpy as np

import functional_ckpt

state = {"w": np.ones(1000), "step": 1}
pending = functional_ckpt.async_save(state, "step-1")
state["w"] *= 2  # training goes on: what is being saved is a copy
print(pending.result().nbytes)  # waits; raises what went wrong, here or on another rank
# --8<-- [end:save]
assert functional_ckpt.open_checkpoint("step-1")["w"][0] == 1

# --8<-- [start:progress]
pending = functional_ckpt.async_save(state, "step-2")
while not pending.done():
    now = pending.progress()
    print(f"{now.phase}: {now.fraction:.0%}")
    try:
        pending.result(timeout=0.5)
    except TimeoutError:
        continue
# --8<-- [end:progress]
pending.result()

# --8<-- [start:sweep]
# At start-up, before the first save: what dead processes left unfinished here.
removed = functional_ckpt.sweep(".")
print(removed)
# --8<-- [end:sweep]
assert removed == ()
