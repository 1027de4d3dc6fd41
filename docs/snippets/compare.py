"""Three things that can go wrong, done to three checkpoints of the same tensors."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import functional_ckpt
from functional_ckpt import errors

warnings.simplefilter("ignore")  # DCP says at length that it runs in one process
w = torch.arange(100_000, dtype=torch.float32)


# --8<-- [start:flip]
def flip_a_bit(path):
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(path).write_bytes(data)


functional_ckpt.save({"w": w}, "flipped")
flip_a_bit("flipped/w/c.0")
try:
    functional_ckpt.load({"w": torch.zeros_like(w)}, "flipped")
except errors.CorruptionError as error:
    print("functional_ckpt:", error.chunk, error.what)

dcp.save({"w": w}, checkpoint_id="flipped-dcp")
flip_a_bit("flipped-dcp/__0_0.distcp")
state = {"w": torch.zeros_like(w)}
dcp.load(state, checkpoint_id="flipped-dcp")
print("torch DCP: no error; equal to what was saved:", torch.equal(state["w"], w))

save_file({"w": w}, "flipped.safetensors")
flip_a_bit("flipped.safetensors")
loaded = load_file("flipped.safetensors")
print("safetensors: no error; equal to what was saved:", torch.equal(loaded["w"], w))
# --8<-- [end:flip]

# --8<-- [start:kill]
# Step 1 is saved. A process replaces it by step 2, and dies with its data written.
DIE_OURS = """
import os, torch, functional_ckpt
import functional_ckpt.store.commit as commit
commit.put_in_place = lambda *_: os._exit(9)
functional_ckpt.save({"w": torch.full((9,), 2.0)}, "killed", overwrite=True)
"""
DIE_DCP = """
import os, torch, torch.distributed.checkpoint as dcp
dcp.FileSystemWriter.finish = lambda *_, **__: os._exit(9)
dcp.save({"w": torch.full((9,), 2.0)}, checkpoint_id="killed-dcp")
"""
step_1 = {"w": torch.full((9,), 1.0)}
functional_ckpt.save(step_1, "killed")
dcp.save(step_1, checkpoint_id="killed-dcp")
for script in (DIE_OURS, DIE_DCP):
    dead = subprocess.run([sys.executable, "-W", "ignore", "-c", script])
    assert dead.returncode == 9

state = functional_ckpt.load({"w": torch.zeros(9)}, "killed")
print("functional_ckpt: the path holds step", int(state["w"][0]))
state = {"w": torch.zeros(9)}
dcp.load(state, checkpoint_id="killed-dcp")
print("torch DCP: the path holds metadata of step 1, data of step", int(state["w"][0]))
# --8<-- [end:kill]

# --8<-- [start:pickle]
metadata = Path("killed-dcp/.metadata").read_bytes()
print("torch DCP's metadata is a pickle:", metadata.startswith(b"\x80"))
ours = [name for _, _, names in os.walk("killed") for name in names]
print("functional_ckpt's files:", *sorted(ours))
# --8<-- [end:pickle]
