"""How long ranks wait for one that may have raised elsewhere: its file shows that it is on its way."""

import pytest

pytest.importorskip("torch")

from functional_ckpt.torch.megatron import arrival


def test_a_file_that_changes_shows_that_he_is_on_his_way(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(arrival.time, "monotonic", lambda: now[0])
    file = tmp_path / "common.pt"
    expected = arrival.Expectation(10.0, file)
    for seconds, size in ((109.0, 1), (118.0, 2), (127.0, 3)):
        now[0] = seconds
        file.write_bytes(b"x" * size)
        assert not expected.is_over()
    now[0] = 136.9
    assert not expected.is_over()
    now[0] = 137.0
    assert expected.is_over()


def test_without_other_ranks_nobody_waits():
    arrival.wait_for_rank_0(None, 1.0, "save", 3)
