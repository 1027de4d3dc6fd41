"""What a save or a load held is gone when it returns or fails, without the collector, which may run late or never."""

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.errors import CheckpointError
from functional_ckpt.store.files import FileStore
from functional_ckpt.testing.simulate import run_ranks, try_ranks

WHOLE = np.arange(64 * 12, dtype="int32").reshape(64, 12)
SPEC = fc.ArraySpec("w", WHOLE.shape, "int32")
LAYOUTS = {
    "exclusive": fc.LayoutPolicy(min_chunk_nbytes=0),
    "owned": fc.LayoutPolicy(target_chunk_nbytes=2 * 12 * 4, min_chunk_nbytes=2**20),
}


def columns(rank: int, size: int) -> dict[str, fc.LocalShards]:
    """Equal columns, of which every chunk of rows has some."""
    wide = WHOLE.shape[1] // size
    box = fc.Box((0, rank * wide), (64, rank * wide + wide))
    return {"w": fc.LocalShards((fc.ShardSpec(SPEC, box),), (WHOLE[box.slices].copy(),))}


def left_by(call: Callable[[], object]) -> Counter[str]:
    """Return what a call leaves that only the cycle collector frees: objects of ours and memory, by type."""
    gc.collect()
    enabled, debug = gc.isenabled(), gc.get_debug()
    gc.disable()
    try:
        call()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names = [f"{type(left).__module__}.{type(left).__qualname__}" for left in gc.garbage]
    finally:
        gc.set_debug(debug)
        gc.garbage.clear()
        if enabled:
            gc.enable()
    return Counter(name for name in names if name.startswith(("functional_ckpt.", "numpy.")))


def test_the_count_sees_a_cycle() -> None:
    def tie() -> None:
        knot: list[object] = [fc.Box((0,), (1,))]
        knot.append(knot)

    assert left_by(tie) == {"functional_ckpt.spec.box.Box": 1}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "size"), [("save", 1), ("save", 3), ("async_save", 1)])
def test_a_save_leaves_nothing_to_the_collector(name: str, size: int, layout: str, tmp_path: Path) -> None:
    policy = fc.SavePolicy(layout=LAYOUTS[layout], durability="none")

    def saving(path: Path) -> None:
        def on_rank(gather: object, rank: int) -> None:
            done = getattr(fc, name)(columns(rank, size), path, policy=policy, process_group=gather)
            if name == "async_save":
                done.result()

        run_ranks(size, lambda gather: on_rank(gather, gather.rank))

    saving(tmp_path / "warm")  # what is imported, or remembered, stays
    assert left_by(lambda: saving(tmp_path / "a")) == {}


@pytest.mark.parametrize("read_once", [False, True])
def test_a_load_leaves_nothing_to_the_collector(read_once: bool, tmp_path: Path) -> None:
    fc.save({"w": WHOLE}, tmp_path / "a", policy=fc.SavePolicy(layout=LAYOUTS["owned"], durability="none"))
    policy = fc.LoadPolicy(read_once=read_once)

    def loading() -> None:
        run_ranks(3, lambda g: fc.load(columns(g.rank, 3), tmp_path / "a", policy=policy, process_group=g) and None)

    loading()
    assert left_by(loading) == {}


FAILURES = {
    "CheckpointErrors",
    "CorruptionError",
    "KeyMismatchError",
    "SpecError",
    "StorageError",
    "UnsupportedLeafError",
}


def failures_of(size: int, call: Callable[[object, int], object]) -> list[str]:
    """Call on all ranks what must fail; return the types of the errors."""

    def on_rank(gather: object, rank: int) -> str:
        try:
            call(gather, rank)
        except CheckpointError as error:  # `pytest.raises` would tie a knot
            return type(error).__name__
        return "nothing"

    return [*map(str, try_ranks(size, lambda gather: on_rank(gather, gather.rank)))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("refused", ["zarr.json", "c.0.0", "leaf"])
@pytest.mark.parametrize(("name", "size"), [("save", 1), ("save", 3), ("async_save", 1)])
def test_a_save_that_fails_leaves_nothing_to_the_collector(
    name: str, size: int, refused: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = fc.SavePolicy(layout=LAYOUTS[layout], durability="none")
    create = FileStore.create

    def create_or_fail(store: FileStore, file: str, *arguments: object, **options: object) -> None:
        if file.endswith(refused):
            raise OSError(28, "No space left on device")
        create(store, file, *arguments, **options)

    def saving(gather: object, rank: int) -> None:
        state = {**columns(rank, size), **({"x": object, "y": iter(())} if refused == "leaf" else {})}
        done = getattr(fc, name)(state, tmp_path / "a", policy=policy, process_group=gather)
        if name == "async_save":
            done.result()

    monkeypatch.setattr(FileStore, "create", create_or_fail)
    assert {*failures_of(size, saving)} <= FAILURES
    assert left_by(lambda: failures_of(size, saving)) == {}


@pytest.mark.parametrize("fault", ["corrupt", "short", "no such key", "other types"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("read_once", [False, True])
def test_a_load_that_fails_leaves_nothing_to_the_collector(
    read_once: bool, size: int, fault: str, tmp_path: Path
) -> None:
    fc.save({"w": WHOLE, "n": 3}, tmp_path / "a", policy=fc.SavePolicy(layout=LAYOUTS["owned"], durability="none"))
    (chunk,) = (tmp_path / "a" / "w").glob("c.0.*")
    if fault in ("corrupt", "short"):
        chunk.write_bytes(bytes(chunk.stat().st_size - (fault == "short")))

    def loading(gather: object, rank: int) -> None:
        like = {**columns(rank, size), "n": np.zeros(3) if fault == "other types" else 0}
        like |= {"x": np.zeros(3), "y": 1} if fault == "no such key" else {}
        fc.load(like, tmp_path / "a", policy=fc.LoadPolicy(read_once=read_once), process_group=gather)

    assert {*failures_of(size, loading)} <= FAILURES
    assert left_by(lambda: failures_of(size, loading)) == {}


def test_an_array_that_cannot_be_read_leaves_nothing_to_the_collector(tmp_path: Path) -> None:
    fc.save({"w": WHOLE}, tmp_path / "a", policy=fc.SavePolicy(durability="none"))
    chunk = tmp_path / "a" / "w" / "c.0.0"
    chunk.write_bytes(bytes(chunk.stat().st_size))

    def reading() -> None:
        try:
            fc.open_checkpoint(tmp_path / "a")["w"][...]
        except CheckpointError:
            return
        raise AssertionError("it was read")

    reading()
    assert left_by(reading) == {}


@pytest.mark.parametrize("name", ["save", "async_save", "load"])
def test_the_collector_works_as_the_user_wants_it(name: str, tmp_path: Path) -> None:
    """What it is set to counts while we work, too, and stays."""
    before, state, seen = gc.get_threshold(), {"w": WHOLE.copy()}, []
    fc.save(state, tmp_path / "load")

    def look(_: object) -> None:
        seen.append((gc.isenabled(), gc.get_threshold()))
        gc.disable()
        gc.set_threshold(555, 5, 6)

    gc.set_threshold(777, 7, 8)
    try:
        done = getattr(fc, name)(state, tmp_path / name, progress=look)
        if name == "async_save":
            done.result()
        assert seen[0] == (True, (777, 7, 8))
        assert (gc.isenabled(), gc.get_threshold()) == (False, (555, 5, 6))
    finally:
        gc.enable()
        gc.set_threshold(*before)
