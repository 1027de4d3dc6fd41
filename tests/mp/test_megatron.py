"""Inside an unmodified megatron-core: its save and load, its sharded leaves, its callers and wrappers, two ranks.

Written for 0.16; what later versions still have is also tested with those (``tox -e megatron-newer``). Megatron calls
CUDA for CPU tensors too; where there is none, the three functions that it calls do nothing here. Its callers start
processes, which the pool's daemons may not.
"""

import json
import os
import time
import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from tests import pages  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
    pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")
    import megatron.core

pytestmark = pytest.mark.mp


IS_NEWER = not megatron.core.__version__.startswith("0.16")
until_016 = pytest.mark.skipif(IS_NEWER, reason="later versions have neither a registry nor a way to pass a strategy")

NO_CUDA = "import torch\ntorch.cuda.device_count = lambda: 1\ntorch.cuda.set_device = lambda *_: None\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call a function of ``(rank, path)`` in `size` processes."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "sitecustomize.py").write_text(NO_CUDA)
    paths = [str(tmp_path / "stub"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def call(function, *arguments, size=2):
        (tmp_path / "a").mkdir(exist_ok=True)
        store = tmp_path / f"store-{function.__name__}"
        context = mp.start_processes(
            _joined, (size, function, str(store), tmp_path / "a", arguments), size, join=False, start_method="spawn"
        )
        ends = time.monotonic() + 240
        while not context.join(max(0.0, ends - time.monotonic()), grace_period=10):  # returns when any process ends
            assert time.monotonic() < ends
        return tmp_path / "a"

    return call


def _joined(rank, size, function, store, path, arguments):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    function(rank, path, *arguments)
    dist.barrier()
    dist.destroy_process_group()


WHOLE = torch.arange(96.0).reshape(4, 6, 4)


def state(rank, axis=0, fill=True):
    """Return a state dict of Megatron's leaves, cut along `axis`, and what its tensors are to be."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    def made(data):
        return data.clone() if fill else torch.zeros_like(data)

    tensor = ShardedTensor.from_rank_offsets
    part = WHOLE.chunk(2, axis)[rank]
    want = {
        "w": part,
        "layers": [WHOLE[i] for i in ((0, 1), (2, 3))[rank]],
        "copy": WHOLE[0],
        "half": WHOLE[0].bfloat16(),
    }
    return {
        "w": tensor("model/w", made(part), (axis, rank, 2)),
        "layers": [tensor("layers", made(WHOLE[i]), (0, i, 4), prepend_axis_num=1) for i in ((0, 1), (2, 3))[rank]],
        "copy": tensor("copy", made(WHOLE[0]), replica_id=rank),
        "half": tensor("half", made(WHOLE[0].bfloat16()), replica_id=(0, rank)),
        "rng": ShardedObject("a/rng", {"state": (rank, torch.ones(2))} if fill else None, (2,), (rank,)),
        "step": 3,
    }, want


def check(found, want, rank):
    for key, tensor in want.items():
        pairs = zip(found[key], tensor, strict=True) if isinstance(tensor, list) else [(found[key], tensor)]
        assert all(torch.equal(a, b) for a, b in pairs), key
    assert found["rng"]["state"][0] == rank
    assert found["step"] == 3


def saver():
    """Return our strategy in the form that this version of Megatron does not replace."""
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from functional_ckpt.torch.megatron.plugin import ZarrSaveStrategy

    return FullyParallelSaveStrategyWrapper(ZarrSaveStrategy()) if IS_NEWER else ZarrSaveStrategy()


def sync(rank, path):
    from megatron.core import dist_checkpointing as mcore

    from functional_ckpt.torch.megatron.plugin import ZarrLoadStrategy, ZarrSaveStrategy

    mcore.save(state(rank)[0], str(path), sharded_strategy=ZarrSaveStrategy())
    for axis in range(3):
        wanted, want = state(rank, axis if axis < 2 else 0, fill=False)
        check(mcore.load(wanted, str(path), sharded_strategy=ZarrLoadStrategy() if axis else None), want, rank)
        assert torch.equal(wanted["w"].data, want["w"])
    metadata = mcore.load_tensors_metadata(str(path))
    assert {*metadata} == {"model/w", "layers", "copy", "half"}
    assert metadata["layers"].global_shape == (4, 6, 4)
    assert metadata["half"].dtype == torch.bfloat16
    every = mcore.load(mcore.serialization.load_sharded_metadata(str(path)), str(path), validate_access_integrity=False)
    assert torch.equal(every["model/w"], WHOLE)
    assert every["a/rng/shard_1_2"]["state"][0] == 1
    wanted = {"w": state(rank, fill=False)[0]["w"], "x": mcore.ShardedTensor.from_rank_offsets("x", torch.ones(2))}
    _, missing, unexpected = mcore.load(wanted, str(path), strict="return_all", validate_access_integrity=False)
    assert (missing, unexpected) == ({"layers", "copy", "half", "a/rng"}, {"x"})
    if rank == 0:
        mcore.remove_sharded_tensors(str(path), "lay")
    dist.barrier()
    assert "layers" not in mcore.load_tensors_metadata(str(path))


@until_016
def test_megatron_saves_and_loads(run):
    import functional_ckpt

    path = run(sync)
    assert functional_ckpt.verify(path).ok
    assert {"common.pt", "metadata.json", "zarr.json"} < {p.name for p in path.iterdir()}
    assert json.loads((path / "metadata.json").read_text())["sharded_backend"] == "functional_ckpt"
    stored = functional_ckpt.open_checkpoint(path)
    assert torch.equal(torch.from_numpy(stored["model/w"][...]), WHOLE)
    assert "step" not in stored.state()


def background(rank, path, persistent):
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from functional_ckpt.torch.megatron.plugin import ZarrLoadStrategy

    queue = AsyncCallsQueue(persistent=persistent)
    for number in range(2):
        place = path / str(number)
        place.mkdir(exist_ok=True)
        dist.barrier()
        source = state(rank)[0]
        request = mcore.save(source, str(place), saver(), async_sharded_save=True)
        queue.schedule_async_request(request)
        source["w"].data.fill_(-1)
        assert not mcore.check_is_distributed_checkpoint(str(place))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    queue.close()
    for number in range(2):
        wanted, want = state(rank, 1, fill=False)
        check(mcore.load(wanted, str(path / str(number)), ZarrLoadStrategy()), want, rank)


@pytest.mark.parametrize("persistent", [False, True], ids=["temporal", "persistent"])
def test_megatrons_callers_wait_for_the_writer_thread(run, persistent):
    run(background, persistent)


def failing(rank, path):
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.core import CheckpointingException

    import functional_ckpt.api
    from functional_ckpt.torch.megatron.plugin import ZarrSaveStrategy

    def save(place, source, **more):
        (path / place).mkdir(exist_ok=True)
        dist.barrier()
        return mcore.save(source, str(path / place), ZarrSaveStrategy(), validate_access_integrity=False, **more)

    twice = {"w": mcore.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))}
    with pytest.raises(CheckpointingException, match="'w'"):
        save("sync", twice)
    with pytest.raises(CheckpointingException, match="'w'"):
        save("early", twice, async_sharded_save=True)
    save("good", state(rank)[0])
    with pytest.raises(CheckpointingException, match="'x'"):
        mcore.load({"x": mcore.ShardedTensor.from_rank_offsets("x", torch.ones(2))}, str(path / "good"),
                   validate_access_integrity=False)  # fmt: skip

    def fails(*_):
        raise functional_ckpt.errors.StorageError("no space left")

    real, functional_ckpt.api.write = functional_ckpt.api.write, fails
    request = save("late", state(rank)[0], async_sharded_save=True)
    with pytest.raises(CheckpointingException, match="no space left"):
        request.execute_sync()
    functional_ckpt.api.write = real
    for place in ("sync", "early", "late"):
        assert not mcore.check_is_distributed_checkpoint(str(path / place))


@until_016
def test_problems_are_megatrons_on_both_ranks(run):
    run(failing)


def wrapped(rank, path):
    """Save and load as docs/megatron.md says for versions that know no strategies but their own."""
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    from functional_ckpt.torch.megatron.plugin import ZarrLoadStrategy

    shown = SimpleNamespace(**pages.shown("megatron.md", "megatron_newer.py"))
    places = {name: path / name for name in ("now", "later")}
    for place in places.values():
        place.mkdir(exist_ok=True)
    dist.barrier()
    shown.save(state(rank)[0], str(places["now"]))
    queue = AsyncCallsQueue()
    queue.schedule_async_request(shown.save(state(rank)[0], str(places["later"]), async_sharded_save=True))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()
    loader = FullyParallelLoadStrategyWrapper(ZarrLoadStrategy(), exchange_algo="gather_object")
    for place in places.values():
        for load in (shown.load, lambda wanted, place: mcore.load(wanted, place, loader)):
            wanted, want = state(rank, 1, fill=False)
            check(load(wanted, str(place)), want, rank)
        _, missing, unexpected = mcore.load(state(rank)[0], str(place), ZarrLoadStrategy(), strict="return_all")
        assert (missing, unexpected) == (set(), set())
        assert {*mcore.load_tensors_metadata(str(place), ZarrLoadStrategy())} == {"model/w", "layers", "copy", "half"}
        assert mcore.serialization.load_common_state_dict(str(place)) == {"step": 3}


def test_megatrons_wrappers(run):
    path = run(wrapped)
    for name in ("now", "later"):
        assert json.loads((path / name / "metadata.json").read_text())["sharded_backend"] == "functional_ckpt"
        assert (path / name / "zarr.json").is_file()


def registered(rank, path):
    from megatron.core import dist_checkpointing as mcore

    import functional_ckpt.torch.megatron.plugin  # noqa: F401 - registers

    mcore.save(state(rank)[0], str(path), ("functional_ckpt", 1))
    wanted, want = state(rank, 1, fill=False)
    check(mcore.load(wanted, str(path)), want, rank)


@until_016
def test_the_registry_names_it(run):
    run(registered)


def saved_over(rank, path):
    """Save over a checkpoint, at once and in the background; what of it is there meanwhile is refused."""
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.core import CheckpointingException

    import functional_ckpt.run.saving
    from functional_ckpt.torch.megatron.plugin import ZarrLoadStrategy
    from functional_ckpt.torch.megatron.serialization import load

    def loads():
        wanted, want = state(rank, 1, fill=False)
        found = mcore.load(wanted, str(path), ZarrLoadStrategy())
        step = found.pop("step")
        check({**found, "step": 3}, {**want, "w": want["w"] + step - 3}, step)
        return step

    def save(step, **options):
        held = {**state(rank)[0], "step": step}
        held["w"].data += step - 3
        held["rng"].data["state"] = (step, torch.ones(2))
        return mcore.save(held, str(path), saver(), **options)

    for step in (3, 4):
        save(step)
        assert loads() == step
    request = save(5, async_sharded_save=True)
    with pytest.raises(CheckpointingException):  # there is no metadata.json
        loads()
    request.async_fn(*request.async_fn_args)
    request.finalize_fns[0]()
    # What a process leaves that dies here is whole, but Megatron does not look at it.
    found = load(state(rank, fill=False)[0], path, validate_access_integrity=False)
    assert (found["step"], found["rng"]["state"][0]) == (5, 5)
    with pytest.raises(CheckpointingException):
        loads()
    torch.distributed.barrier()  # or a slow rank would find the metadata.json that a fast one has written
    for function in request.finalize_fns[1:]:
        function()
    assert loads() == 5

    # Megatron has written common.pt when our strategy fails.
    def fails(*_):
        raise functional_ckpt.errors.StorageError("no space left")

    real, functional_ckpt.run.saving.write_plan = functional_ckpt.run.saving.write_plan, fails
    with pytest.raises(CheckpointingException, match="no space left"):
        save(6)
    functional_ckpt.run.saving.write_plan = real
    with pytest.raises(CheckpointingException):
        loads()
    save(7)
    assert loads() == 7
    dist.barrier()
    if rank == 0:
        torch.save({"step": 8}, path / "common.pt")
    dist.barrier()
    with pytest.raises(CheckpointingException, match="not the one that was saved with the tensors"):
        loads()


def test_a_save_over_another_is_the_old_one_the_new_one_or_none(run):
    run(saved_over)


def by_both(rank, path):
    """Megatron loads what `serialization.save` has saved, and the reverse."""
    from megatron.core import dist_checkpointing as mcore

    import functional_ckpt.torch.megatron.plugin
    from functional_ckpt.torch.megatron import serialization

    for save, place in ((mcore.save, path / "theirs"), (serialization.save, path / "ours")):
        place.mkdir(exist_ok=True)
        dist.barrier()
        options = {"sharded_strategy": ("functional_ckpt", 1)} if save is mcore.save else {}
        save(state(rank)[0], str(place), content_metadata={"a": 1}, **options)
        for package in (mcore, serialization):
            wanted, want = state(rank, 1, fill=False)
            check(package.load(wanted, str(place)), want, rank)
            assert package.load_content_metadata(str(place)) == {"a": 1}
            assert {*package.load_tensors_metadata(str(place))} == {"model/w", "layers", "copy", "half"}
            found = {**package.load_plain_tensors(str(place))}
            assert torch.equal(found["model/w"], WHOLE)
        assert torch.equal(torch.from_numpy(functional_ckpt.open_checkpoint(place)["model/w"][...]), WHOLE)


@until_016
def test_both_ways_load_what_either_saves(run):
    run(by_both)
