"""The registry of strategies, their interfaces, and saves in the background of one process."""

import threading

import pytest

torch = pytest.importorskip("torch")

from functional_ckpt.errors import CheckpointError, PolicyError  # noqa: E402
from functional_ckpt.torch.megatron.strategies import base  # noqa: E402
from functional_ckpt.torch.megatron.strategies.async_calls import AsyncCallsQueue, AsyncRequest  # noqa: E402
from functional_ckpt.torch.megatron.strategies.base import (  # noqa: E402
    StrategyAction,
    get_default_strategy,
    register_built_in_strategy,
    register_default_strategy,
)


class Loads(base.LoadShardedStrategy):
    def check_backend_compatibility(self, loaded_backend):
        pass

    def check_version_compatibility(self, loaded_version):
        pass

    def load(self, sharded_state_dict, checkpoint_dir):
        return {"from": checkpoint_dir}

    def load_tensors_metadata(self, checkpoint_dir):
        return {"tensors": checkpoint_dir}


class LoadsObjects(Loads):
    can_handle_sharded_objects = True


class LoadsCommon(base.LoadCommonStrategy):
    check_backend_compatibility = check_version_compatibility = lambda self, loaded: None

    def load_common(self, checkpoint_dir):
        return {}

    def load_sharded_objects(self, sharded_objects_state_dict, checkpoint_dir):
        return {}


class Saves(base.AsyncSaveShardedStrategy):
    def async_save(self, sharded_state_dict, checkpoint_dir):
        return AsyncRequest(
            sharded_state_dict["log"].append, (checkpoint_dir,), [lambda: sharded_state_dict["log"].append("done")]
        )


class SavesCommon(base.SaveCommonStrategy):
    def save_common(self, common_state_dict, checkpoint_dir):
        pass


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    """Give each test a registry of its own."""
    monkeypatch.setattr(base, "default_strategies", type(base.default_strategies)(dict))


# --- the registry ---


def test_a_registered_strategy_is_found():
    strategy = Loads()
    register_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1, strategy)
    assert get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1) is strategy
    assert base.default_strategies["load_sharded"] == {("zarr", 1): strategy}
    for action, backend, version in (
        ("LOAD_COMMON", "zarr", 1),
        ("LOAD_SHARDED", "tar", 1),
        ("LOAD_SHARDED", "zarr", 2),
    ):
        with pytest.raises(CheckpointError, match="no strategy is registered"):
            get_default_strategy(StrategyAction[action], backend, version)


def test_a_users_override_stays():
    built_in, mine, newer = Loads(), Loads(), Loads()
    register_built_in_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1, built_in)
    register_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1, mine)
    for _ in range(2):
        register_built_in_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1, built_in)
        assert get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1) is mine
    register_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1, newer)
    assert get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1) is newer


@pytest.mark.parametrize("register", [register_default_strategy, register_built_in_strategy])
def test_what_cannot_do_the_action_is_refused(register):
    for action, strategy in (("LOAD_COMMON", Loads()), ("SAVE_SHARDED", Loads()), ("LOAD_SHARDED", Loads)):
        with pytest.raises(PolicyError, match="needs a method"):
            register(StrategyAction[action], "zarr", 1, strategy)
    with pytest.raises(PolicyError, match="not an action"):
        register("load_sharded", "zarr", 1, Loads())


# --- the interfaces ---


def test_interfaces_are_abstract():
    for name in ("LoadStrategyBase", "LoadCommonStrategy", "LoadShardedStrategy"):
        with pytest.raises(TypeError, match="abstract"):
            getattr(base, name)()
    for name in ("SaveCommonStrategy", "SaveShardedStrategy", "AsyncSaveShardedStrategy"):
        with pytest.raises(TypeError, match="abstract"):
            getattr(base, name)("zarr", 1)


def test_a_strategy_names_its_format():
    strategy = Saves("zarr", 1)
    assert (strategy.backend, strategy.version, str(strategy)) == ("zarr", 1, "Saves(zarr, 1)")


def test_objects_are_not_handled_unless_a_strategy_says_so():
    for strategy in (Loads(), LoadsCommon(), Saves("zarr", 1), SavesCommon("zarr", 1)):
        assert strategy.can_handle_sharded_objects is False
    assert LoadsObjects().can_handle_sharded_objects is True


def test_sharded_metadata_are_those_of_tensors_where_there_are_no_objects():
    assert Loads().load_sharded_metadata("here") == {"tensors": "here"}
    assert LoadsCommon().load_sharded_metadata("here") == {}
    with pytest.raises(NotImplementedError, match="LoadsObjects does not define load_sharded_metadata"):
        LoadsObjects().load_sharded_metadata("here")


def test_what_a_strategy_leaves_out_is_said_when_it_is_called():
    for call in (
        lambda: Loads().remove_sharded_tensors("here", "w"),
        lambda: SavesCommon("zarr", 1).save_sharded_objects({}, "here"),
    ):
        with pytest.raises(NotImplementedError, match="does not define") as caught:
            call()
        assert isinstance(caught.value, CheckpointError)


def test_an_async_strategy_saves_synchronously():
    log = []
    Saves("zarr", 1).save({"log": log}, "here")
    assert log == ["here", "done"]


# --- requests and the queue ---


def test_a_request_is_a_tuple_of_what_to_do():
    request = AsyncRequest(None, (), [])
    assert request == (None, (), [], {}, None, False, 0)
    request.add_finalize_fn(print)
    frozen = request.freeze()
    assert frozen.finalize_fns is request.finalize_fns == [print]
    assert (request.is_frozen, frozen.is_frozen) == (False, True)
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(print)


def test_a_request_runs_with_all_its_arguments():
    seen = []
    request = AsyncRequest(
        lambda *args, **kwargs: seen.append((args, kwargs)), (1, None, 3), [], {"k": 4}, preload_fn=lambda: 2
    )
    request.execute_sync()
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.close()
    assert seen == [((1, 2, 3), {"k": 4})] * 2


def test_a_preload_fn_needs_its_place():
    with pytest.raises(CheckpointError, match="three arguments"):
        AsyncRequest(print, (), [], preload_fn=lambda: 1).execute_sync()


def test_preload_runs_on_the_callers_thread_and_work_does_not():
    seen, names = [], []
    queue = AsyncCallsQueue()
    work = AsyncRequest(
        lambda *_: seen.append(threading.current_thread()), (0, None, 0), [lambda: names.append("done")],
        preload_fn=lambda: seen.append(threading.current_thread()),
    )  # fmt: skip
    assert queue.schedule_async_request(work) == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert seen[0] is threading.current_thread() is not seen[1]
    assert names == ["done"]
    assert queue.maybe_finalize_async_calls() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_the_worker_ends_unless_it_is_to_stay(persistent):
    queue = AsyncCallsQueue(persistent)
    threads = []
    for number in range(2):
        queue.schedule_async_request(AsyncRequest(lambda: threads.append(threading.current_thread()), (), []))
        assert queue.maybe_finalize_async_calls(blocking=True) == [number]
    assert (threads[0] is threads[1]) is persistent
    queue.close()
    threads[1].join(10)
    assert not threads[1].is_alive()


def test_aborted_calls_are_never_finalised():
    queue, gate, seen = AsyncCallsQueue(), threading.Event(), []
    queue.schedule_async_request(AsyncRequest(gate.wait, (10,), [lambda: seen.append("published")]))
    queue.schedule_async_request(AsyncRequest(lambda: seen.append("work"), (), []))
    queue.close(abort=True)
    gate.set()
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert seen == []


def test_waiting_is_optional():
    queue, gate = AsyncCallsQueue(), threading.Event()
    queue.schedule_async_request(AsyncRequest(gate.wait, (10,), []))
    assert queue.maybe_finalize_async_calls() == []
    assert queue.maybe_finalize_async_calls(no_dist=True) == []
    gate.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
