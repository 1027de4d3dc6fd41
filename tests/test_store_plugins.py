"""Stores of other packages, found by entry points: used everywhere, and told clearly where they are wrong."""

import sys
import textwrap

import numpy as np
import pytest

import functional_ckpt
from functional_ckpt import SavePolicy, StorePolicy, load, open_checkpoint, save, sweep, verify
from functional_ckpt.errors import CheckpointError, NotImplementedYet, PolicyError, StorageError
from functional_ckpt.store import open_store
from functional_ckpt.store.plugins import _opener

SOURCE = """
    from functional_ckpt.errors import AlreadyExistsError, SpecError
    from functional_ckpt.store import WholeStore

    PLACES, OPENED = {}, []

    class Dicts(WholeStore):
        url = None
        lease_s = 0.2

        def __init__(self, url, access, guard):
            OPENED.append((url, access, guard))
            self.url, self.guard, self.objects = url, guard, PLACES.setdefault(url, {})

        def put(self, name, data):
            if name in self.objects:
                raise AlreadyExistsError("an object exists already", path=name)
            self.objects[name] = data

        def read(self, name, limit=2**62):
            return self.objects.get(name)

        def names(self):
            yield from list(self.objects)

        def delete(self, names):
            for name in names:
                self.objects.pop(name, None)

        def stamp(self, name):
            return self.objects.get(name)

        def replace(self, name, data, stamp):
            if self.objects.get(name) != stamp:
                return None
            self.objects[name] = data
            return data

    def broken(url, access, guard):
        raise OSError("no such host")

    def refuses(url, access, guard):
        raise SpecError("this place is closed")

    def nothing(url, access, guard):
        return object()

    number = 3
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return what installs a package that registers stores, and its module."""
    _opener.cache_clear()

    def install(name, **stores):
        place = tmp_path / f"site-{name}"
        info = place / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{scheme} = {value}\n" for scheme, value in stores.items())
        (info / "entry_points.txt").write_text(f"[functional_ckpt.stores]\n{lines}")
        (place / f"{name}.py").write_text(textwrap.dedent(SOURCE))
        monkeypatch.syspath_prepend(place)

    yield install
    for name in ("dicts", "others"):
        sys.modules.pop(name, None)
    _opener.cache_clear()


def test_a_store_of_another_package_is_used_everywhere(package):
    package("dicts", dicts="dicts:Dicts")
    state = {"w": np.arange(6.0).reshape(2, 3), "step": 3}
    access = StorePolicy(concurrency=3)
    save(state, "dicts://a/step-1", policy=SavePolicy(store=access))
    loaded = load({"w": np.zeros((2, 3)), "step": 0}, "dicts://a/step-1")
    assert np.array_equal(loaded["w"], state["w"])
    assert loaded["step"] == 3
    assert verify("dicts://a/step-1").ok
    assert open_checkpoint("dicts://a/step-1")["w"][1, 1] == 4
    assert sweep("dicts://a/step-1") == ()
    functional_ckpt.async_save(state, "dicts://a/step-2").result()
    with pytest.raises(CheckpointError, match="committed checkpoint"):
        save(state, "dicts://a/step-1")
    opened = sys.modules["dicts"].OPENED
    assert any(policy == access for _, policy, _ in opened)
    assert any(guard is not None and guard.endswith(".claim") for _, _, guard in opened)
    assert not [name for name in open_store("dicts://a/step-1").names() if "claim" in name]


def test_what_is_wrong_with_an_entry_point_is_told(package):
    package("dicts", broken="dicts:broken", refuses="dicts:refuses", nothing="dicts:nothing", number="dicts:number",
            absent="dicts:absent", gone="no_such_module:Store", twice="dicts:Dicts", s3="dicts:broken")  # fmt: skip
    package("others", twice="others:Dicts")
    for scheme, kind, words in (
        ("broken", StorageError, ("package dicts", "OSError: no such host")),
        ("refuses", CheckpointError, ("this place is closed",)),
        ("nothing", PolicyError, ("is no store", "kvstore", "WholeStore")),
        ("number", PolicyError, ("is no store", "found 3")),
        ("absent", PolicyError, ("cannot be imported", "dicts:absent", "Install dicts again")),
        ("gone", PolicyError, ("cannot be imported", "no_such_module")),
        ("twice", PolicyError, ("several packages", "dicts, others", "Uninstall")),
        ("papyrus", NotImplementedYet, ("functional_ckpt.stores", "s3://")),
    ):
        with pytest.raises(kind) as caught:
            open_store(f"{scheme}://a/b")
        assert all(word in str(caught.value) for word in words), caught.value
    assert type(open_store("s3://bucket/a")).__name__ == "ObjectStore"  # ours are not replaced


def test_a_package_that_is_found_twice_counts_once(package, tmp_path, monkeypatch):
    package("dicts", dicts="dicts:Dicts")
    monkeypatch.syspath_prepend(tmp_path / "site-dicts" / ".")
    assert open_store("dicts://a").url == "dicts://a"
