"""numpy trees without torch: the library neither needs nor imports it. Runs where torch is not installed, too."""

import json
import subprocess
import sys

import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import (
    ArraySpec,
    LayoutPolicy,
    LoadPolicy,
    PerRank,
    SavePolicy,
    async_save,
    load,
    open_checkpoint,
    save,
    verify,
)
from functional_ckpt.spec.array import BITS, DTYPES
from functional_ckpt.store.encoding import numpy_dtype
from functional_ckpt.testing.simulate import run_ranks
from functional_ckpt.testing.values import special_words

# No test here may import torch, and the library may not either: where torch is installed, a block shows it.
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked: " + name)
sys.meta_path.insert(0, Block())
"""

EVERYTHING = (
    BLOCKED
    + """
import tempfile, numpy as np, functional_ckpt as fc
for name in fc.__all__:
    getattr(fc, name)
path = tempfile.mkdtemp() + "/a"
state = {"w": np.arange(6.0).reshape(2, 3), "t": (1, b"x"), "p": fc.PerRank([np.ones(2), 3])}
fc.save(state, path)
fc.async_save(state, path, overwrite=True).result()
like = {"w": np.zeros((2, 3)), "t": None, "p": fc.PerRank([np.zeros(2), 0])}
assert fc.load(like, path)["t"] == (1, b"x")
assert fc.verify(path).ok and fc.open_checkpoint(path).state()["w"][1, 2] == 5
try:
    fc.save({"o": object()}, path + "o", policy=fc.SavePolicy(object_codec="torch"))
except fc.errors.ObjectCodecError as error:
    assert "torch" in str(error)
else:
    raise SystemExit("no error")
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
print("fine")
"""
)


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_everything_works_where_torch_cannot_be_imported():
    done = run(EVERYTHING)
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_import_is_light():
    heavy = ["torch", "tensorstore", "zarr", "rich", "hypothesis"]
    done = run(f"import sys, functional_ckpt; print([n for n in {heavy} if n in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


def test_stored_torch_values_say_that_they_need_torch(tmp_path, fast):
    save({"size": (1,), "w": np.ones(1)}, tmp_path / "a", policy=fast)
    for name in ("manifest.json", "zarr.json"):
        path = tmp_path / "a" / name
        path.write_bytes(path.read_bytes().replace(b"~tuple", b"~torch.Size"))
    from functional_ckpt.store.commit import manifest_digest

    root = json.loads((tmp_path / "a/zarr.json").read_bytes())
    root["attributes"]["functional_ckpt"]["manifest"] = manifest_digest((tmp_path / "a/manifest.json").read_bytes())
    (tmp_path / "a/zarr.json").write_text(json.dumps(root))
    code = f"""
import functional_ckpt as fc
try:
    fc.load({{"size": None}}, {str(tmp_path / "a")!r}, policy=fc.LoadPolicy(keys="size"))
except fc.errors.ObjectCodecError as error:
    print(error.key, "needs torch" in str(error))
"""
    done = run(BLOCKED + code)
    assert done.stdout == "size True\n", done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extended", ["native", "bits"])
def test_every_dtype(dtype, extended, tmp_path, same):
    words = special_words(dtype)
    array = np.resize(words, 12 * numpy_dtype(dtype).itemsize // words.itemsize).view(numpy_dtype(dtype)).reshape(3, 4)
    layout = LayoutPolicy(extended_dtypes=extended, target_chunk_nbytes=array.itemsize * 5, min_chunk_nbytes=0)
    manifest = save({"w": array}, tmp_path / "a", policy=SavePolicy(layout=layout, durability="none"))
    assert manifest.by_key["w"].layout.stored == (BITS.get(dtype, dtype) if extended == "bits" else dtype)
    same(load({"w": ArraySpec("w", (3, 4), dtype)}, tmp_path / "a")["w"], array)
    same(open_checkpoint(tmp_path / "a").state(), {"w": array})


def test_a_tree(tmp_path, fast, plain_tree, same):
    save(plain_tree(5), tmp_path / "a", policy=fast)
    like = plain_tree(0)
    loaded = load(like, tmp_path / "a")
    same(loaded, plain_tree(5))
    assert loaded["model"]["w"] is like["model"]["w"]
    assert verify(tmp_path / "a").ok


def test_in_memory_and_in_the_background(plain_tree, same):
    pending = async_save(plain_tree(2), "memory://notorch")
    assert pending.result(20).nbytes == 5 * 3 * 4 + 3 * 8
    same(load(plain_tree(0), "memory://notorch"), plain_tree(2))


def test_simulated_ranks(tmp_path, fast):
    def saving(gather):
        state = {"copy": np.arange(10), "own": PerRank(np.full(2, gather.rank))}
        return save(state, tmp_path / "a", policy=fast, process_group=gather)

    run_ranks(3, saving)
    policy = LoadPolicy(per_rank=lambda values, rank, size: sum(values))
    like = {"copy": np.zeros(10, int), "own": PerRank(np.zeros(2, int))}
    loaded = load(like, tmp_path / "a", policy=policy)
    assert loaded["own"].value.tolist() == [3, 3]
    assert loaded["copy"].tolist() == list(range(10))


def test_a_process_group_of_the_wrong_kind(problems_of):
    (problem,) = problems_of(functional_ckpt.save, {}, "memory://group", process_group="gloo")
    assert "process group" in str(problem)
