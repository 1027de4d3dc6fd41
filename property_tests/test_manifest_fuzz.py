"""P5 and robustness: manifests survive JSON, and whatever else lies there gets an error of ours."""

import json

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from functional_ckpt.errors import CheckpointError, CorruptionError, FormatVersionError
from functional_ckpt.plan.entry import RankItem
from functional_ckpt.plan.listing import path_from_json
from functional_ckpt.plan.manifest import (
    DIGEST_NBYTES,
    VERSION,
    Manifest,
)
from functional_ckpt.plan.record import canonical, path_text, path_to_json
from functional_ckpt.spec.tree import DictKey
from functional_ckpt.testing import strategies as fst

# Most of the time goes into drawing manifests; these laws look at one fact of each.
FEWER = settings(max_examples=settings.default.max_examples // 3)


@given(fst.manifests())
def test_p5_json_keeps_every_field_and_is_canonical(manifest):
    text = manifest.to_json()
    other = Manifest.from_json(text)
    assert other == manifest
    assert other.to_json() == text
    assert hash(other) == hash(manifest)
    assert text.isascii()
    assert canonical(json.loads(text)).encode() == text


PATH_ITEMS = (
    st.text() | st.integers() | st.builds(DictKey, st.integers() | st.booleans()) | st.builds(RankItem, st.integers(0))
)


@given(st.lists(st.text() | PATH_ITEMS, max_size=4).map(tuple))
@example(("model", "layer.0"))
def test_p5_the_text_of_a_path_is_canonical_and_gives_it_back(path):
    text = path_text("w", path)
    event(
        "told by the key" if text is None else "all text" if all(isinstance(item, str) for item in path) else "others"
    )
    if text is None:
        assert path == ("w",)
        return
    assert text == canonical(path_to_json(path))
    assert path_from_json(json.loads(text)) == path


@FEWER
@given(fst.manifests(), st.integers(0, 99), st.text(min_size=3, max_size=5), fst.json_values())
def test_p5_unknown_fields_of_the_same_major_version_are_ignored(manifest, minor, name, value):
    document = json.loads(manifest.to_json())
    document["version"] = [VERSION[0], minor]
    for record in (document, *document["arrays"], *document["values"], *document["aliases"]):
        record.setdefault(f"x{name}", value)
    assert Manifest.from_json(json.dumps(document).encode()) == manifest


@FEWER
@given(fst.manifests(), st.integers(VERSION[0] + 1, 99), fst.json_values())
def test_p5_a_newer_major_version_is_refused_whatever_else_it_says(manifest, major, value):
    document = {**json.loads(manifest.to_json()), "version": [major, 0], "arrays": value}
    with pytest.raises(FormatVersionError, match="newer"):
        Manifest.from_json(json.dumps(document).encode())


SHORT_DIGEST = b"""{"format":"functional_ckpt","version":[1,0],"values":[],"aliases":[],"per_rank":[],
"attributes":{},"arrays":[{"key":"w","dtype":"int8","shape":[1],"chunk":[1],"digests":["00"]}]}"""
ALIAS_TO_NOTHING = b"""{"format":"functional_ckpt","version":[1,0],"values":[],"per_rank":[],"attributes":{},
"arrays":[],"aliases":[{"key":"w","target":"v"}]}"""


@given(fst.mangled_manifests())
@example(SHORT_DIGEST)
@example(ALIAS_TO_NOTHING)
@example(b"")
@example(b"null")
@example(b"\xff\xfe{")
@example(b'{"format":"functional_ckpt","version":[1,0]}')
@example(b"[" * 100_000)
@example(b'{"format":"functional_ckpt","version":' + b"1" * 5000 + b"}")
def test_damaged_manifests_get_an_error_of_ours(text):
    try:
        manifest = Manifest.from_json(text)
    except CheckpointError as error:
        event(type(error).__name__)
        return
    event("still a manifest")
    check_consistent(manifest)


def check_consistent(manifest):
    """Check that nothing the manifest says leads a reader outside of what it lists."""
    assert Manifest.from_json(manifest.to_json()) == manifest
    for entry in manifest.arrays:
        assert len(entry.digests) == entry.grid.size * DIGEST_NBYTES
        assert len(entry.layout.chunk) == len(entry.spec.shape)
        if entry.grid.size:
            last = tuple(count - 1 for count in entry.grid.counts)
            assert entry.spec.box.contains(entry.grid.box(last))
            assert len(entry.digest(entry.grid.position(last))) == DIGEST_NBYTES
    assert {alias.target for alias in manifest.aliases} <= {entry.spec.key for entry in manifest.arrays}
    assert manifest.nbytes >= 0
    assert manifest.by_key.keys() >= {alias.key for alias in manifest.aliases}


@FEWER
@given(fst.manifests().filter(lambda manifest: any(entry.digests for entry in manifest.arrays)), st.booleans())
def test_every_chunk_has_one_digest(manifest, too_many):
    document = json.loads(manifest.to_json())
    digests = next(record["digests"] for record in document["arrays"] if record["digests"])
    digests[:] = [*digests, digests[0]] if too_many else digests[1:]
    with pytest.raises(CorruptionError):
        Manifest.from_json(json.dumps(document).encode())


@pytest.mark.parametrize("digests", [["0" * 31, "0" * 33], ["0" * 64, ""], [" " * 4 + "0" * 28, "0" * 32], [0, 0]])
def test_each_digest_has_its_length(digests):
    record = {"key": "w", "dtype": "int8", "shape": [2], "chunk": [1], "digests": ["0" * 32, "1" * 32]}
    document = {**json.loads(Manifest().to_json()), "arrays": [record]}
    assert Manifest.from_json(json.dumps(document).encode()).arrays[0].digest(1) == b"\x11" * DIGEST_NBYTES
    record["digests"] = digests
    with pytest.raises(CorruptionError):
        Manifest.from_json(json.dumps(document).encode())
