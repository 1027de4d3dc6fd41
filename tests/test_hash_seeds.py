"""What ranks compare does not depend on the order of a set, which differs from process to process."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import torch
from functional_ckpt.store.encoding import digest
from functional_ckpt.store.values import plain_text
from functional_ckpt.torch.object_codec import dump
from functional_ckpt.torch.megatron.validation import _digests

class Holder:
    def __init__(self, **fields):
        self.__dict__.update(fields)

names = {f"name{i}" for i in range(40)}
inner = frozenset(frozenset({f"a{i}", f"b{i}"}) for i in range(9))
plain = {"set": names, "tuple": (1, frozenset(names), {2: names}), "inner": inner}
objects = [(torch.ones(2), names), Holder(names=names, inner=inner), (torch.ones(1), {Holder: names}, inner)]
print(list(names)[:5])
print(sorted(_digests({"plain": plain, "objects": objects}, ())))
print([digest(dump("key", each)).hex() for each in objects], plain_text(plain))
"""


def test_digests_of_state_are_the_same_in_every_process():
    said = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        said.append(done.stdout.splitlines())
    orders, digests, objects = zip(*said, strict=True)
    assert orders[0] != orders[1]
    assert digests[0] == digests[1]
    assert objects[0] == objects[1]
