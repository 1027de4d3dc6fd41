"""The cycle collector is as it was, whatever order work begins and ends in."""

import gc
import pickle
from contextlib import nullcontext
from itertools import permutations, product
from pathlib import Path

import pytest

import functional_ckpt
from functional_ckpt.collector import RareCollection


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
    del work
    assert gc.get_threshold() == before


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
def test_a_load_through_dcp_leaves_it_as_it_was_wherever_it_fails(step: str, tmp_path: Path) -> None:
    torch, dcp = pytest.importorskip("torch"), pytest.importorskip("torch.distributed.checkpoint")
    from functional_ckpt.torch import ZarrStorageReader

    path, before = tmp_path / "checkpoint", gc.get_threshold()
    functional_ckpt.save({"w": torch.ones(2)}, path)
    planner, seen = dcp.DefaultLoadPlanner(), []

    def look(*arguments: object) -> object:
        seen.append(gc.get_threshold()[0])
        raise RuntimeError(step)

    if step != "no step":
        setattr(planner, step, look)
    reader = ZarrStorageReader(path)
    with pytest.raises(BaseException, match=step) if step != "no step" else nullcontext():
        dcp.load({"w": torch.zeros(2)}, storage_reader=reader, planner=planner)
    assert all(threshold > before[0] for threshold in seen)
    reader.reset()
    assert gc.get_threshold() == before
