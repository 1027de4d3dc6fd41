"""X2 and values: keys become node names that never collide, plain values survive JSON."""

import json
import math
import unicodedata

from hypothesis import event, example, given
from hypothesis import strategies as st

from functional_ckpt.errors import CheckpointError
from functional_ckpt.plan.record import canonical
from functional_ckpt.store.encoding import chunk_name, node_name
from functional_ckpt.store.values import decode_text, decode_value, encode_value, is_plain
from functional_ckpt.testing import strategies as fst

KEYS = fst.keys() | st.sampled_from(["", ".", "..", "zarr.json", "manifest.json", "__x", "~", "~e", "/", "c.0"])
LONG = st.tuples(KEYS, st.integers(0, 300)).map(lambda pair: pair[0] * pair[1])


@given(KEYS | LONG, KEYS | LONG)
@example("W", "w")
@example("caf\u00e9", "cafe\u0301")
@example("a" * 300, "a" * 301)
@example("~e", "")
@example("~dzarr.json", "zarr.json")
def test_x2_different_keys_have_different_node_names(one, other):
    names = [node_name(key) for key in (one, other)]
    # What file systems may fold: letters of another case, and forms of one character.
    folded = {unicodedata.normalize("NFC", name).casefold() for name in names}
    assert len(folded) == len({one, other})


@given(KEYS | LONG)
def test_x2_a_node_name_is_one_safe_path_component(key):
    name = node_name(key)
    event("kept" if name == key else "escaped")
    assert 0 < len(name.encode()) <= 200
    assert not set(name) & set('/\\:*?"<>|')
    assert all(ord(c) >= 32 and ord(c) != 127 for c in name)
    assert not name.startswith((".", "__"))
    assert name not in ("zarr.json", "manifest.json", "provenance.json")


@given(st.lists(st.integers(0, 12), max_size=4), st.lists(st.integers(0, 12), max_size=4))
def test_x2_different_chunks_have_different_names(one, other):
    assert (chunk_name(tuple(one)) == chunk_name(tuple(other))) == (one == other)


FLOATS = st.floats() | st.sampled_from([math.nan, -math.nan, -0.0, 5e-324])
VALUES = st.recursive(
    fst.plain_values() | FLOATS | st.builds(complex, FLOATS, FLOATS),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(st.text("~ab", max_size=3) | st.integers() | st.booleans(), values, max_size=3)
        | st.lists(values, max_size=3).map(tuple)
        | st.frozensets(st.integers() | st.text(max_size=2), max_size=3)
    ),
    max_leaves=6,
)


@given(VALUES)
@example({"~tuple": [1]})
@example({1: "a", "1": "b", None: "c"})
@example((1, [2, (3, {"~float": "nan"})]))
def test_plain_values_survive_json(value):
    assert is_plain(value)
    text = canonical(encode_value(value))
    found = decode_text("key", text)
    assert described(found) == described(value)
    assert canonical(encode_value(found)) == text


def described(value):
    """Return a text that tells apart what equality does not: 1 and True, 0.0 and -0.0; dicts without order."""
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{described(k)}:{described(v)}" for k, v in value.items())) + "}"
    if isinstance(value, frozenset):
        return "frozenset" + ",".join(sorted(map(described, value)))
    if isinstance(value, list | tuple):
        return type(value).__name__ + "(" + ",".join(map(described, value)) + ")"
    return repr(value)


@given(fst.json_values() | st.dictionaries(st.sampled_from(["~tuple", "~float", "~bytes", "~dict", "~x"]),
                                           fst.json_values(), max_size=2))  # fmt: skip
def test_json_that_no_value_encodes_to_gets_an_error_of_ours(coded):
    try:
        decode_value(json.loads(json.dumps(coded)))
    except CheckpointError as error:
        event(type(error).__name__)
