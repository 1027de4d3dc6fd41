"""What a person sees who types a name into a shell or a notebook: short, and nothing that a key can steer."""

from html.parser import HTMLParser
from threading import Event

import numpy as np
import pytest

import functional_ckpt as fc
from functional_ckpt.plan.layout import Layout
from functional_ckpt.plan.manifest import ArrayEntry, Manifest
from functional_ckpt.show.html import tree_html
from functional_ckpt.show.outline import Leaf, outline
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.store.files import FileStore

FAST = fc.SavePolicy(durability="none")
VOID = {"br", "hr", "img"}


class Page(HTMLParser):
    """Checks that all tags are closed in order, and collects tags and text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def many(n):
    layout = Layout("exclusive", (8, 8), (), "float32")
    keys = [f"model.layers.{i // 12}.part{i % 12}.weight" for i in range(n)]
    return Manifest(tuple(ArrayEntry(ArraySpec(key, (8, 8), "float32"), layout, bytes(16)) for key in sorted(keys)))


def test_a_manifest_of_thousands_of_arrays_is_one_line():
    assert repr(many(2880)) == "Manifest(2,880 arrays, 184,320 parameters, 720.0 KiB in 2,880 chunks)"


def test_a_checkpoint_and_its_arrays_are_short(tmp_path):
    assert repr(fc.save({"w": np.ones((2, 3), "f4"), "step": 1}, tmp_path / "c", policy=FAST)) == (
        "Manifest(1 array, 6 parameters, 24 B in 1 chunk, 1 value)"
    )
    checkpoint = fc.open_checkpoint(tmp_path / "c")
    summary = "1 array, 6 parameters, 24 B in 1 chunk, 1 value"
    assert repr(checkpoint) == f"Checkpoint({str(tmp_path / 'c')!r}, {summary})"
    assert repr(checkpoint["w"]) == "StoredArray('w', (2, 3), float32, 24 B in 1 chunk)"


def test_a_pending_save_tells_its_phase_and_how_it_ended(tmp_path, monkeypatch):
    begun, go_on, real = Event(), Event(), FileStore.create

    def create(*arguments, **options):
        begun.set()
        assert go_on.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(FileStore, "create", create)
    pending = fc.async_save({"w": np.ones(3)}, tmp_path / "c", policy=FAST)
    assert begun.wait(60)
    assert repr(pending) == "PendingSave(write, 0%)"
    go_on.set()
    pending.result(60)
    assert repr(pending) == "PendingSave(published)"

    def refuse(*arguments, **options):
        raise fc.errors.StorageError("no room")

    monkeypatch.setattr(FileStore, "create", refuse)
    pending = fc.async_save({"w": np.ones(3)}, tmp_path / "d", policy=FAST)
    with pytest.raises(fc.errors.StorageError):
        pending.result(60)
    assert repr(pending) == "PendingSave(failed: StorageError)"


def test_a_notebook_gets_a_tree_that_opens(tmp_path):
    fc.save({"model": {"w": np.ones(3), "b": np.ones(2)}, "step": 1}, tmp_path / "c", policy=FAST)
    for value in (fc.open_checkpoint(tmp_path / "c"), fc.read_manifest(tmp_path / "c")):
        page = Page(value._repr_html_())
        text = " ".join("".join(page.texts).split())
        assert "2 arrays, 5 parameters, 40 B in 2 chunks, 1 value" in text
        for part in ("model", "float64 [3]", "24 B", "step"):
            assert part in text
        assert [tag for tag, _ in page.tags].count("details") == 1


def test_the_page_of_a_large_model_is_small():
    text = many(2880)._repr_html_()
    assert len(text) < 20_000  # layers that are alike are one row
    different = [Leaf(f"a{i}.b{j}.c", f"int8 [{i}, {j}]", 1, 1, 1, True, "int8") for i in range(90) for j in range(90)]
    page = tree_html("x", outline(different))
    assert len(page) < 500_000
    assert "and 30 more" in page
    Page(page)


HOSTILE = "<script>alert(1)</script>'\"><img src=x onerror=alert(1)>&amp;\x1b[2J\u202e"


@pytest.mark.parametrize("key", [HOSTILE, f"a.{HOSTILE}", "x" * 5000])
def test_keys_and_values_of_others_are_text(tmp_path, key):
    manifest = fc.save({key: np.ones(2), "v": HOSTILE}, tmp_path / "c", policy=FAST)
    text = manifest._repr_html_()
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= {"div", "span", "strong", "details", "summary"}
    assert {name for _, attributes in page.tags for name in attributes} <= {"style", "title", "open"}
    assert text.isprintable()
    assert repr(fc.open_checkpoint(tmp_path / "c")[key]).isprintable()


def test_keys_nested_however_deep_are_shown(tmp_path):
    leaves = [Leaf(".".join("a" * n), "v") for n in range(1, 3000)]
    root = outline(leaves)
    assert root.values == 2999
    Page(tree_html("x", root))
