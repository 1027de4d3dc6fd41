"""What a load does about keys that only the request or only the checkpoint has."""

import logging

import pytest

torch = pytest.importorskip("torch")

from functional_ckpt.errors import KeyMismatchError  # noqa: E402
from functional_ckpt.torch.megatron.mapping import ShardedTensor, ShardedTensorFactory, logger  # noqa: E402
from functional_ckpt.torch.megatron.serialization import StrictHandling, load, save  # noqa: E402

W = torch.arange(24.0).reshape(6, 4)
tensor = ShardedTensor.from_rank_offsets


def factory(data):
    def halves(key, data, replica_id, flattened_range):
        return {"up": tensor(f"{key}.up", data[:3]), "down": tensor(f"{key}.down", data[3:])}

    return ShardedTensorFactory("w1", data, halves, lambda parts: torch.cat([parts["up"], parts["down"]]))


def request(*keys):
    return {key: tensor(key, torch.zeros(2)) for key in keys}


def saved(tmp_path):
    save({key: tensor(key, torch.ones(2)) for key in ("a", "b")}, tmp_path)
    return tmp_path


def test_what_the_checkpoint_lacks_is_an_error_by_default(tmp_path):
    with pytest.raises(KeyMismatchError, match="'c'"):
        load(request("a", "c"), saved(tmp_path))
    assert {*load(request("a"), tmp_path)} == {"a"}


def test_strict_raise(tmp_path, problems_of):
    path = saved(tmp_path)
    for strict in ("raise_unexpected", "raise_all"):
        problems = problems_of(load, request("a", "c"), path, strict=strict)
        assert [p.key for p in problems] == (["c"] if strict == "raise_unexpected" else ["c", "b"])
    load(request("a"), path, strict="raise_unexpected")
    with pytest.raises(KeyMismatchError, match="no rank asks"):
        load(request("a"), path, strict="raise_all")


def test_strict_return(tmp_path):
    path = saved(tmp_path)
    found, missing, unexpected = load(request("a", "c"), path, strict=StrictHandling.RETURN_ALL)
    assert ({*found}, missing, unexpected) == ({"a"}, {"b"}, {"c"})
    found, missing, unexpected = load(request("a", "c"), path, strict=StrictHandling.RETURN_UNEXPECTED)
    assert ({*found}, missing, unexpected) == ({"a"}, set(), {"c"})


LOGGED = {"c": "Unexpected keys (for this rank)", "b": "Missing keys (for all ranks)"}


@pytest.mark.parametrize(("strict", "logged"), [("log_unexpected", "c"), ("log_all", "cb"), ("ignore_all", "")])
def test_strict_log_and_ignore(tmp_path, caplog, strict, logged):
    path = saved(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert {*load(request("a", "c"), path, strict=strict)} == {"a"}
    assert {key for key in "abc" if f"'{key}'" in caplog.text} == {*logged}
    assert [record.name for record in caplog.records] == [logger.name] * len(logged)
    assert all(record.message.startswith(LOGGED[key]) for key, record in zip(logged, caplog.records, strict=True))


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="strict is unknown"):
        load({}, saved(tmp_path), strict="maybe")


def test_a_factory_of_which_a_part_is_not_stored_is_left_out(tmp_path):
    save({"x": tensor("w1.up", W[:3].clone()), "y": tensor("y", W)}, tmp_path)
    wanted = {"made": factory(W.clone()), "y": tensor("y", torch.zeros(6, 4))}
    assert {*load(wanted, tmp_path, strict="ignore_all", validate_access_integrity=False)} == {"y"}
