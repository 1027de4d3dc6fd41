"""Lanes: several threads of a rank, several groups, ranks that call different things or wait for different times."""

import threading
import time

import attrs
import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.errors import CheckpointError, SpecError
from tests.mp import launch

pytestmark = pytest.mark.mp

SOON = fc.SavePolicy(timeout_s=20, durability="none")
READ = fc.LoadPolicy(timeout_s=20)
SHORT_S = 2


def state(step):
    from torch.distributed.tensor import Shard

    whole = launch.values(64, 32, seed=step)
    return {"w": launch.distributed(whole, launch.mesh(2), [Shard(0)]), "n": step, "mine": fc.PerRank(launch.rank())}


def in_threads(*functions, limit_s=40):
    """Call each function on a thread of its own; return what each returned or raised, in order."""
    found = [TimeoutError("still running")] * len(functions)

    def run(number):
        try:
            found[number] = functions[number]()
        except BaseException as error:  # a thread may end with anything
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    return found


def check_all(found):
    """Raise the first error among what threads returned."""
    for each in found:
        if isinstance(each, BaseException):
            raise each


def saving_and_loading(path):
    fc.save(state(1), path / "stored", policy=SOON)

    def save():
        for step in range(6):
            fc.save(state(step), path / f"s{step}", policy=SOON)

    def load():
        for _ in range(12):
            found = fc.load({**state(0), "n": 0}, path / "stored", policy=attrs.evolve(READ, read_once=True))
            launch.same(found["w"], state(1)["w"])

    def save_in_background():
        for step in range(6):
            fc.async_save(state(step), path / f"a{step}", policy=SOON).result(20)

    check_all(in_threads(save, load, save_in_background))


def test_threads_that_save_and_load_do_not_mix(two, tmp_path):
    two.run(saving_and_loading, tmp_path)
    for name in [f"{kind}{step}" for kind in "sa" for step in range(6)]:
        assert fc.verify(tmp_path / name).ok
        assert fc.open_checkpoint(tmp_path / name).tree()["n"] == int(name[1])


def over_two_groups(path):
    """Each thread has a group of its own; of two that save in the background the ranks begin in different order."""
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def save(number):
        for step in range(5):
            value = {"w": np.full((8, 8), 10.0 * number + step), "mine": fc.PerRank(launch.rank())}
            fc.save(value, path / f"{number}.{step}", policy=SOON, process_group=groups[number])

    check_all(in_threads(lambda: save(0), lambda: save(1)))

    def begin(number):
        time.sleep(0.3 * (number == launch.rank()))
        pending = fc.async_save({"w": np.ones(3)}, path / f"a{number}", policy=SOON, process_group=groups[number])
        return pending.result(20)

    check_all(in_threads(lambda: begin(0), lambda: begin(1)))


def test_two_threads_save_over_two_groups(two, tmp_path):
    two.run(over_two_groups, tmp_path)
    for name in [f"{number}.{step}" for number in range(2) for step in range(5)]:
        assert fc.verify(tmp_path / name).ok
        assert fc.open_checkpoint(tmp_path / name)["w"][0, 0] == 10 * int(name[0]) + int(name[2])
    assert fc.verify(tmp_path / "a0").ok
    assert fc.verify(tmp_path / "a1").ok


def both_save(path, crosswise):
    """Two threads of each rank save over one group; with `crosswise` the ranks begin with different ones."""

    def save(name, late):
        time.sleep(0.2 * late)
        return fc.save({"w": np.full(50, float(ord(name)))}, path / name, policy=SOON)

    first = launch.rank() == 1 and crosswise
    found = in_threads(lambda: save("a", first), lambda: save("b", not first))
    return [(type(each).__name__, str(each)) if isinstance(each, BaseException) else None for each in found]


def test_two_threads_that_save_over_one_group_take_turns(two, tmp_path):
    assert two.run(both_save, tmp_path, False) == [[None, None]] * 2
    assert [fc.open_checkpoint(tmp_path / name)["w"][0] for name in "ab"] == [97, 98]


def test_two_threads_that_save_in_another_order_on_another_rank_are_told(two, tmp_path):
    for found in two.run(both_save, tmp_path, True):
        assert [each is not None and "different" in each[1] for each in found] == [True, True], found
        assert "save of 'a'" in found[0][1]
        assert "save of 'b'" in found[0][1]
    assert not list(tmp_path.iterdir())


def called(path, calls):
    """Each rank calls another function."""
    policy, read = fc.SavePolicy(timeout_s=SHORT_S), fc.LoadPolicy(timeout_s=SHORT_S)
    return {
        "save": lambda: fc.save({"w": np.ones(3)}, path / "new", policy=policy),
        "async_save": lambda: fc.async_save({"w": np.ones(3)}, path / "new", policy=policy),
        "load": lambda: fc.load({"w": np.ones(3)}, path / "stored", policy=read),
    }[calls[launch.rank()]]()


def stored(path):
    fc.save({"w": np.ones(3)}, path / "stored", policy=SOON)


@pytest.mark.parametrize("calls", [("save", "load"), ("load", "save"), ("async_save", "load"), ("save", "async_save")])
def test_ranks_that_call_different_things_are_told_what_each_called(two, tmp_path, calls):
    two.run(stored, tmp_path)
    for outcome in two.outcomes(called, tmp_path, calls):
        assert isinstance(outcome.error, CheckpointError), outcome
        other = calls[1 - outcome.rank]
        place = "stored" if other == "load" else "new"
        assert f"{other} of '{place}'" in str(outcome.error)
    two.run(stored, tmp_path / "again")


def with_timeouts_of_ones_own(path):
    for number in range(3):
        fc.save(
            state(number),
            path / str(number),
            policy=fc.SavePolicy(timeout_s=launch.NEVER_S + 5 * launch.rank() + number),
        )


def test_ranks_may_wait_for_different_times(two, tmp_path):
    two.run(with_timeouts_of_ones_own, tmp_path)  # who waits for a timeout hangs
    assert all(fc.verify(tmp_path / str(number)).ok for number in range(3))


def late_and_left(path):
    """Rank 1 comes back from its callback when the time is over and the process of the other rank is gone."""
    import os

    def report(progress):
        if progress.phase == "write" and launch.rank() == 1:
            time.sleep(SHORT_S + 2)

    policy = fc.SavePolicy(timeout_s=SHORT_S)
    try:
        fc.save(state(1), path, policy=policy, progress=report)
    except CheckpointError:
        if launch.rank() == 0:
            os._exit(0)
        raise


def test_a_late_rank_whose_peers_are_gone_raises(two, tmp_path):
    first, late = two.outcomes(late_and_left, tmp_path / "a")
    assert first.dead
    assert isinstance(late.error, CheckpointError), late
    assert not list(tmp_path.iterdir())
    two.run(stored, tmp_path)


def in_a_forked_child(path):
    """A child that this rank has forked is no rank; it may save for itself."""
    import os

    from functional_ckpt.run.comm import LocalGather

    fc.save({"w": np.ones(3)}, path / "ranks", policy=SOON)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        fc.save({"w": np.ones(3)}, path / "refused", policy=SOON)
    except SpecError as error:
        fc.save({"w": np.ones(3)}, path / str(launch.rank()), policy=SOON, process_group=LocalGather())
        code = 0 if "forked" in str(error) else 2
    finally:
        os._exit(code)


def test_a_forked_child_of_a_rank_is_refused(two, tmp_path):
    assert two.run(in_a_forked_child, tmp_path) == [0, 0]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["0", "1", "ranks"]
    two.run(stored, tmp_path)
