# ruff: noqa: E402 - each part of a page has the imports that it needs
# --8<-- [start:flip]
import numpy as np

import functional_ckpt

functional_ckpt.save({"w": np.arange(40_000, dtype="float32").reshape(4, 10_000)}, "checkpoint")
with open("checkpoint/w/c.0.0", "r+b") as chunk:  # a bit flips
    chunk.write(b"\x01")
report = functional_ckpt.verify("checkpoint")
problem = report.problems[0]
print(report.ok, problem.key, problem.chunk, problem.what)
# --8<-- [end:flip]

# --8<-- [start:covered]
from functional_ckpt.spec.sharding import from_rank_offsets

# Half of every row: a part of the chunk.
left = {"w": from_rank_offsets("w", "float32", (4, 5_000), (1, 0, 2))}
functional_ckpt.load(left, "checkpoint")  # "covered": not checked, no error
try:
    policy = functional_ckpt.LoadPolicy(verify="full")
    functional_ckpt.load(left, "checkpoint", policy=policy)
except functional_ckpt.errors.CorruptionError as error:
    print(error.chunk, error.what)
# --8<-- [end:covered]
