"""The cycle collector is as it was, whatever order work begins and ends in."""

import gc
import pickle
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations, product
from pathlib import Path

import pytest

import functional_ckpt
from functional_ckpt.collector import RareCollection


@pytest.fixture(autouse=True)
def earlier_tests_are_over() -> None:
    """A save or load through DCP leaves it rare for a second."""
    assert within(10, lambda: gc.get_threshold()[0] < 2_000_000)


@pytest.mark.parametrize("begins", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("ends", list(permutations(range(3))), ids=str)
def test_it_is_rare_from_the_first_begin_to_the_last_end(begins: tuple[int, ...], ends: tuple[int, ...]) -> None:
    before = gc.get_threshold()
    works = [RareCollection() for _ in range(3)]
    for number in begins:
        works[number].begin()
    for number in ends:
        assert gc.get_threshold()[0] > before[0]
        works[number].end()
    assert gc.get_threshold() == before


@pytest.mark.parametrize(("begins", "ends"), list(product((0, 1, 2), repeat=2)))
def test_calls_that_come_twice_or_never_count_once(begins: int, ends: int) -> None:
    before, work = gc.get_threshold(), RareCollection()
    for _ in range(begins):
        work.begin()
    for _ in range(ends):
        work.end()
    assert (gc.get_threshold() != before) == (begins > 0 and ends == 0)
    work.end()
    assert gc.get_threshold() == before


@pytest.mark.parametrize("call", ["end_soon", "none"])
def test_it_ends_by_itself(call: str) -> None:
    before = gc.get_threshold()
    work = RareCollection(at_most_s=60, soon_s=0.05) if call == "end_soon" else RareCollection(at_most_s=0.05)
    for _ in range(2):
        work.begin()
        if call == "end_soon":
            work.end_soon()
        assert gc.get_threshold() != before
        assert within(10, lambda: gc.get_threshold() == before)


def test_what_ends_soon_may_begin_again_at_once() -> None:
    before, work = gc.get_threshold(), RareCollection(at_most_s=60, soon_s=60)
    for end in (work.end_soon, work.end_soon, work.end):
        work.begin()
        end()
    assert gc.get_threshold() == before
    work.end_soon()
    assert gc.get_threshold() == before


def within(seconds: float, is_so: Callable[[], bool]) -> bool:
    ends = time.monotonic() + seconds
    while not is_so() and time.monotonic() < ends:
        time.sleep(0.01)
    return is_so()


def test_a_collector_that_is_off_stays_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        work = RareCollection()
        work.begin()
        assert gc.get_threshold()[0] == 0
        work.end()
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_a_pickled_one_has_not_begun() -> None:
    before, work = gc.get_threshold(), RareCollection()
    work.begin()
    other = pickle.loads(pickle.dumps(work))
    work.end()
    assert gc.get_threshold() == before
    other.end()
    assert gc.get_threshold() == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", ["create_local_plan", "create_global_plan", "finish_plan", "no step"])
@pytest.mark.parametrize("call", ["save", "load"])
def test_dcp_plans_while_it_is_rare_and_leaves_it_as_it_was(call: str, step: str, tmp_path: Path) -> None:
    torch, dcp = pytest.importorskip("torch"), pytest.importorskip("torch.distributed.checkpoint")
    from functional_ckpt.torch import ZarrStorageReader, ZarrStorageWriter

    path, before, seen = tmp_path / "checkpoint", gc.get_threshold(), []
    functional_ckpt.save({"w": torch.ones(2)}, path)
    planner = dcp.DefaultSavePlanner() if call == "save" else dcp.DefaultLoadPlanner()
    run = planner.create_local_plan if step == "no step" else None

    def look(*_: object) -> object:
        seen.append(gc.get_threshold()[0])
        return run() if run else pytest.fail("the planner fails")

    setattr(planner, "create_local_plan" if run else step, look)
    storage = ZarrStorageWriter(path) if call == "save" else ZarrStorageReader(path)
    options = {"storage_writer" if call == "save" else "storage_reader": storage}
    with nullcontext() if run else pytest.raises(BaseException, match="the planner fails"):
        getattr(dcp, call)({"w": torch.zeros(2)}, planner=planner, **options)
    assert seen[0] > before[0]
    if not run:
        storage.reset()
    assert within(10, lambda: gc.get_threshold() == before)
