"""Saves of CUDA tensors: every kind, in the order of the caller's stream, from little memory of the device."""

import pytest
import torch

import functional_ckpt as fc
from functional_ckpt.run.leaves import PerRank
from functional_ckpt.store.pool import the_pool
from functional_ckpt.torch.memory import DeviceBuffer
from tests.gpu.states import (
    CUDA,
    FAST,
    MIB,
    STATES,
    bits,
    blank,
    check_bits,
    device_memory,
    late,
    of_all_kinds,
    on_host,
)


def saved(how, state, path, then=lambda: None):
    """Save in one of two ways; call `then` as soon as the state may change."""
    if how == "save":
        manifest = fc.save(state, path, policy=FAST)
        then()
        return manifest
    pending = fc.async_save(state, path, policy=FAST)
    then()
    return pending.result()


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("which", STATES)
def test_every_tensor_comes_back_on_the_host(how, which, tmp_path):
    state = STATES[which](1)
    expected = bits(state)
    saved(how, state, tmp_path / "a", lambda: blank(state))
    found = fc.load(on_host(state), tmp_path / "a")
    check_bits(bits(found), expected)
    assert fc.verify(tmp_path / "a").ok


def test_what_the_device_saves_is_what_the_host_saves(tmp_path, tree_bytes):
    state = of_all_kinds(2)
    host = {key: leaf.detach().cpu() for key, leaf in state.items() if "tied" not in key}
    fc.save({key: state[key] for key in host}, tmp_path / "a", policy=FAST)
    fc.save(host, tmp_path / "b", policy=FAST)
    one, other = ({**tree_bytes(tmp_path / which), "provenance.json": b""} for which in "ab")
    assert len(one) > 50
    assert one == other


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_what_the_stream_still_computes_is_saved(how, stream, tmp_path):
    """And not what it computes afterwards."""
    state = {"w": torch.zeros(2048, 512, device=CUDA), "t": torch.zeros(300, 200, device=CUDA).t()}
    state |= {"n": torch.zeros((), dtype=torch.int64, device=CUDA)}
    saved(how, state, tmp_path / "warm")  # the first save allocates, which waits for the device
    for step in range(3):
        late()
        for leaf in state.values():
            leaf.add_(1)
        saved(how, state, tmp_path / str(step), lambda: [leaf.add_(100) for leaf in state.values()])
        found = fc.open_checkpoint(tmp_path / str(step))
        expected = step * 101 + 1
        assert {key: set(found[key][...].reshape(-1).tolist()) for key in "wtn"} == {key: {expected} for key in "wtn"}


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_conjugated_view_is_saved_as_what_it_shows(how, stream, tmp_path):
    """It is computed, on the caller's stream, when it is saved."""
    base = torch.zeros(700, 300, dtype=torch.complex64, device=CUDA)
    saved(how, {"z": base.conj()}, tmp_path / "warm")
    late()
    base.add_(2 + 3j)
    saved(how, {"z": base.conj()}, tmp_path / "a", lambda: base.zero_())
    assert set(fc.open_checkpoint(tmp_path / "a")["z"][...].reshape(-1).tolist()) == {2 - 3j}


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_save_does_not_wait_for_another_stream(how, tmp_path):
    state = {"w": torch.ones(1024, 1024, device=CUDA)}
    other = torch.cuda.Stream()
    saved(how, state, tmp_path / "warm")
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        late(4)
        after = other.record_event()
    saved(how, state, tmp_path / "a")
    assert not after.query()
    other.synchronize()


def test_many_saves_while_the_state_changes(stream, tmp_path):
    policy = fc.SavePolicy(durability="none", in_flight="queue")
    state = {str(number): torch.zeros(512, 256, device=CUDA) for number in range(8)}
    pending = []
    for step in range(12):
        pending.append(fc.async_save(state, tmp_path / str(step), policy=policy))
        for leaf in state.values():
            leaf.add_(1)
    for each in pending:
        each.result()
    for step in range(12):
        found = fc.open_checkpoint(tmp_path / str(step))
        assert {float(value) for key in found for value in found[key][...][::97, 0]} == {float(step)}


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_save_of_contiguous_tensors_takes_no_memory_of_the_device(how, tmp_path):
    state = {str(number): torch.ones(64, MIB // 4, device=CUDA) for number in range(4)}
    saved(how, state, tmp_path / "warm")
    with device_memory(at_most=0):
        saved(how, state, tmp_path / "a")


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_save_of_strided_tensors_takes_little_memory_of_the_device(how, tmp_path):
    state = {str(number): torch.ones(MIB // 4, 256, device=CUDA).t() for number in range(3)}
    policy = fc.SavePolicy(durability="none", budget_nbytes=64 * MIB)
    with device_memory(at_most=64 * MIB):
        if how == "save":
            fc.save(state, tmp_path / "a", policy=policy)
        else:
            fc.async_save(state, tmp_path / "a", policy=policy).result()
    assert fc.open_checkpoint(tmp_path / "a")["2"][7, 9] == 1


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_save_that_fails_leaves_the_device_usable(how, stream, tmp_path, monkeypatch):
    state = {"w": torch.ones(1024, 1024, device=CUDA), "t": torch.ones(600, 500, device=CUDA).t()}

    def fail(*arguments):
        raise RuntimeError("the copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceBuffer, "get" if how == "save" else "copy_to", fail)
        with pytest.raises(RuntimeError, match="the copy failed"):
            saved(how, state, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert the_pool().used_nbytes == 0
    assert float(state["w"].sum()) == 2**20
    saved(how, state, tmp_path / "a")
    assert fc.verify(tmp_path / "a").ok


def test_random_states_and_optimizers_resume(stream, tmp_path):
    """A fused and a capturable Adam have their steps on the device."""

    def run(steps, load_from=None, save_to=None):
        torch.manual_seed(3 if load_from is None else 5)
        torch.cuda.manual_seed(3 if load_from is None else 5)
        model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)).to(CUDA)
        kinds = {"fused": {"fused": True}, "capturable": {"capturable": True, "foreach": False}}
        optimizers = {
            name: torch.optim.Adam(part.parameters(), lr=0.01, **options)
            for part, (name, options) in zip((model[0], model[2]), kinds.items(), strict=True)
        }
        scaler = torch.amp.GradScaler("cuda", init_scale=64, growth_interval=2)

        def state():
            # A fresh optimizer has no state before a step of zeros.
            for optimizer in optimizers.values():
                if not optimizer.state:
                    for group in optimizer.param_groups:
                        for parameter in group["params"]:
                            parameter.grad = torch.zeros_like(parameter)
                    before = [parameter.detach().clone() for parameter in group["params"]]
                    optimizer.step()
                    with torch.no_grad():
                        for parameter, value in zip(group["params"], before, strict=True):
                            parameter.copy_(value)
            return {
                "model": model.state_dict(),
                **{name: optimizer.state_dict() for name, optimizer in optimizers.items()},
                "scaler": scaler.state_dict(),
                "rng": PerRank({"cuda": torch.cuda.get_rng_state(), "cpu": torch.get_rng_state()}),
            }

        if load_from is not None:
            found = fc.load(state(), load_from)
            model.load_state_dict(found["model"])
            for name, optimizer in optimizers.items():
                optimizer.load_state_dict(found[name])
            scaler.load_state_dict(found["scaler"])
            torch.cuda.set_rng_state(found["rng"].value["cuda"])
            torch.set_rng_state(found["rng"].value["cpu"])
        for _ in range(steps):
            scaler.scale(model(torch.randn(8, 32, device=CUDA)).square().mean()).backward()
            for optimizer in optimizers.values():
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        steps_of = [each["step"] for optimizer in optimizers.values() for each in optimizer.state.values()]
        assert all(step.is_cuda for step in steps_of)
        if save_to is not None:
            fc.async_save(state(), save_to, policy=FAST).result()
        return {**model.state_dict(), "scale": torch.tensor(scaler.get_scale())}

    run(3, save_to=tmp_path / "a")
    check_bits(bits(run(4, load_from=tmp_path / "a")), bits(run(7)))
