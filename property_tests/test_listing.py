"""The arrays of a manifest are cut from its text where they are as written here: the result is that of parsing it."""

import json
from unittest.mock import patch

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from functional_ckpt.errors import CheckpointError
from functional_ckpt.plan import listing, manifest
from functional_ckpt.plan.entry import Alias, ArrayEntry, RankItem
from functional_ckpt.plan.layout import Layout, grid_of
from functional_ckpt.plan.manifest import Manifest
from functional_ckpt.spec.array import ArraySpec
from functional_ckpt.spec.tree import DictKey
from functional_ckpt.testing import strategies as fst

#: Texts that are cut at, or that mean something to JSON.
MARKS = (
    '"digests":["', '"key":"', '"path":', ',"shape":', '"arrays":[', '"arrays":[{"chunk":', '},{"chunk":',
    '}],"attributes":', '","', '"', "\\", "\x7f", "\x01", " ", "1", "0", "e", "{", "}", "[", "]", ",", "null", "NaN",
)  # fmt: skip
PLAIN = st.text("ab.", max_size=3)
NAMES = PLAIN | st.lists(st.sampled_from([*MARKS, "a", "b.", "é", "\u2028", "."]), max_size=3).map("".join)
PATHS = st.none() | st.lists(
    NAMES | st.integers(0, 9) | st.builds(DictKey, st.integers()) | st.builds(RankItem, st.integers(0, 9)), max_size=3
).map(tuple)


def entry(key, form, path, digest):
    shape, chunk, dtype, ownership, codecs, codec = form
    layout = Layout(ownership, chunk, codecs, dtype)
    return ArrayEntry(ArraySpec(key, shape, dtype), layout, digest * grid_of(shape, chunk).size, path, codec)


FORMS = st.sampled_from([
    ((4,), (4,), "uint8", "exclusive", (), None),
    ((4,), (4,), "uint8", "exclusive", (), "json"),
    ((4,), (4,), "uint8", "owned", (), None),
    ((4,), (4,), "int8", "exclusive", ("zstd",), None),
    ((4,), (2,), "int8", "exclusive", (), None),
    ((0,), (1,), "int8", "exclusive", (), None),
    ((), (), "bool", "exclusive", (), None),
])  # fmt: skip


@st.composite
def manifests_of_few_forms(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    forms = draw(st.lists(FORMS, min_size=1, max_size=2))
    return Manifest(
        tuple(
            entry(
                name,
                draw(st.sampled_from(forms)),
                draw(st.just(tuple(name.split("."))) | PATHS),
                draw(st.binary(min_size=16, max_size=16)),
            )
            for name in sorted(names)
        ),
        (),
        tuple(Alias(f"alias of {name}", name, draw(PATHS)) for name in sorted(names)[: draw(st.integers(0, 1))]),
        (),
        json.dumps(draw(st.dictionaries(NAMES, NAMES, max_size=1)), sort_keys=True, separators=(",", ":")),
    )


def parsed(text):
    """Return the manifest, or the kind of error."""
    try:
        return Manifest.from_json(text)
    except CheckpointError as error:
        return type(error)


def parsed_as_a_whole(text):
    with patch.object(manifest, "split_arrays", lambda text: None):
        return parsed(text)


@given(manifests_of_few_forms() | fst.manifests())
def test_what_is_cut_from_a_text_is_what_parsing_all_of_it_gives(case):
    text = case.to_json()
    assert parsed(text) == parsed_as_a_whole(text) == case
    spaced = json.dumps(json.loads(text)).encode()
    assert parsed(spaced) == case


@st.composite
def edited_texts(draw):
    """The text of a manifest with one part replaced, inserted, or left out; so that records of one frame differ."""
    text = draw(manifests_of_few_forms()).to_json().decode()
    begin = draw(st.integers(0, len(text)))
    end = min(len(text), begin + draw(st.integers(0, 3)))
    new = draw(st.sampled_from(["", *MARKS]))
    if begin < end and draw(st.booleans()):  # in all records: they may still have one frame
        return text.replace(text[begin:end], new).encode()
    return (text[:begin] + new + text[end:]).encode()


def text_of_two(paths):
    form = ((4,), (4,), "uint8", "exclusive", (), None)
    entries = [entry(key, form, path, bytes(16)) for key, path in zip("ab", paths, strict=True)]
    return Manifest(tuple(entries)).to_json().decode()


TEXT = text_of_two([("a",), ("b",)])
LEFT, _, RIGHT = TEXT.partition('"arrays":')
RECORDS, _, RIGHT = RIGHT.partition(',"attributes"')
RIGHT = f'"attributes"{RIGHT}'
# Members that only JSON reads as the list of arrays.
OTHER_NAMES = ('"arrays" :', '"arr\\u0061ys":')
NESTED = [f'{LEFT}{name}[],"x":{{"arrays":{RECORDS},"attributes":{{}}}},{RIGHT}' for name in OTHER_NAMES]
LATER = [f'{LEFT}"arrays":{RECORDS},{RIGHT[:-1]},{name}[]}}' for name in OTHER_NAMES]
EARLIER = [f'{LEFT}{name}[],"arrays":{RECORDS},{RIGHT}' for name in OTHER_NAMES]
WITH_PATHS = text_of_two([("m", 1, "x"), ("m", 1, "y")])


def all_of(old, new, text=TEXT):
    """The text of two arrays with another part in both records."""
    assert text.count(old) >= 2
    return text.replace(old, new).encode()


def second(old, new, text=TEXT):
    """The text of two arrays with another part in the second record."""
    begin = text.rindex('{"chunk"')
    assert old in text[begin:]
    return (text[:begin] + text[begin:].replace(old, new, 1)).encode()


@settings(max_examples=3 * settings.default.max_examples)
@given(edited_texts())
@example(TEXT.encode())
@example(WITH_PATHS.encode())
@example(second('"m"', '"m\\u0062"', WITH_PATHS))
@example(second('["m",1,', '["m",', WITH_PATHS))
@example(second('["m",1,', '["m","', WITH_PATHS))
@example(second('["m",1,"y"]', '["m\\n"]', WITH_PATHS))
@example(second('["m",1,"y"]', '["m\n"]', WITH_PATHS))
@example(second('["m",1,"y"]', "null", WITH_PATHS))
@example(second('["m",1,"y"]', "[]", WITH_PATHS))
@example(second('"shape":[4]', '"shape":[5]', WITH_PATHS))
@example(second('"shape":[4]', '"shape":[4]"path":["b"]'))
@example(all_of('"shape"', '"key":"c","shape"'))
@example(all_of('"shape"', '"shape":[4],"shape"'))
@example(all_of('"shape"', '"dtype":"int8","shape"'))
@example(all_of('"shape"', '"digests":["11111111111111111111111111111111"],"shape"'))
@example(second('"b"', '"b\\u0062"'))
@example(second('"b"', '"b\x01"'))
@example(second('"b"', '"b","key":"c"'))
@example(second("00", "  "))
@example(second("00", "zz"))
@example(second("0" * 32, "0" * 30))
@example(second("0" * 32, "0" * 34))
@example(second('"shape"', '"shape":[4],"shape"'))
@example(second('"shape"', '"path":["b"],"shape"'))
@example(second('"shape"', '"x":[{"a":1},{"chunk":[4]}],"shape"'))
@example(TEXT.replace('"attributes":{}', '"attributes":{"x":[{"y":1}],"attributes":{}}').encode())
@example(TEXT.replace('"attributes":{}', '"attributes":{},"arrays":[]').encode())
@example(
    TEXT.replace('"arrays":[', '"attributes":{"arrays":[').replace('"attributes":{},', '"attributes":{}},').encode()
)
@example(TEXT.replace('"attributes":{}', '"attributes":{"arrays":[]}').encode())
@example(TEXT.replace('"aliases":[]', '"aliases":{"arrays":[{"chunk":[4]}],"attributes":{}}').encode())
@example(
    TEXT.replace('"arrays":', '"arr\\u0061ys":[],"x":{"arrays":')
    .replace('"attributes":{}', '"attributes":{}}')
    .encode()
)
@example(NESTED[0].encode())
@example(NESTED[1].encode())
@example(LATER[0].encode())
@example(LATER[1].encode())
@example(EARLIER[0].encode())
@example(EARLIER[1].encode())
@example(f'{LEFT}"arrays":{RECORDS},{RIGHT[:-1]},"aliases":[{{"key":"z","target":"a"}}]}}'.encode())
@example(TEXT.replace('"key":"a"', '"key":"a\\"b"').replace('"key":"b"', '"key":"c"b"').encode())
@example(TEXT.replace("[4]", "[4.0]").encode())
@example(second("[4]", "[4.0]"))
@example(second("[4]", "[true]"))
@example(second("uint8", "uint9"))
def test_an_edited_text_is_what_parsing_all_of_it_gives(text):
    found = parsed(text)
    event("a manifest" if isinstance(found, Manifest) else "an error")
    assert found == parsed_as_a_whole(text)


def test_records_of_one_frame_are_parsed_once():
    entries = [entry(f"w{n}", ((4,), (4,), "uint8", "exclusive", (), None), (f"w{n}",), bytes(16)) for n in range(9)]
    with patch.object(listing, "array_of", wraps=listing.array_of) as calls:
        assert Manifest.from_json(Manifest(tuple(entries)).to_json()).arrays == tuple(entries)
    assert calls.call_count == 1
