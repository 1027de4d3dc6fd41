"""Data types of the standard library and of numpy: as values they come back as they went in, by `save` and by DCP."""

import base64
import io
import itertools
import json
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

import functional_ckpt
from functional_ckpt.errors import CheckpointError
from functional_ckpt.plan.record import canonical
from functional_ckpt.store.data_types import DATA_DECODERS
from functional_ckpt.store.values import MAX_INLINE_NBYTES, decode_text, decode_value, encode_value, plain_text
from functional_ckpt.testing import strategies as fst

counter = itertools.count()
# Each example saves and loads.
FEWER = settings(max_examples=settings.default.max_examples // 3)


def stream(data, position):
    found = io.BytesIO(data)
    found.seek(position)
    return found


def path(kind, text):
    return kind(text.replace("\0", ""))


OFFSETS = st.timedeltas(timedelta(hours=-23), timedelta(hours=23))
ZONES = st.builds(timezone, OFFSETS) | st.builds(timezone, OFFSETS, st.text(max_size=3)) | st.just(UTC)
CLOCKS = st.none() | ZONES
ARRAYS = fst.array_specs("w").flatmap(fst.arrays)
NUMPY = (
    ARRAYS
    | ARRAYS.map(lambda x: x.astype(x.dtype.newbyteorder(">")) if x.dtype.isbuiltin != 2 else x)
    | ARRAYS.filter(lambda x: x.size).map(lambda x: x.reshape(-1)[0])
    | st.lists(st.text(max_size=3), max_size=3).map(lambda x: np.array(x, "U3"))
    | st.lists(st.binary(max_size=3), max_size=3).map(lambda x: np.array(x, "S3"))
    | st.builds(np.datetime64, st.integers(-(2**40), 2**40), st.sampled_from(["s", "D", "us"]))
    | st.builds(np.timedelta64, st.integers(-(2**40), 2**40), st.sampled_from(["ns", "W"]))
    | st.text(max_size=4).map(np.str_)
    | st.binary(max_size=4).map(np.bytes_)
)
DATA = (
    st.dates()
    | st.datetimes(timezones=CLOCKS)
    | st.times(timezones=CLOCKS)
    | st.timedeltas()
    | ZONES
    | st.decimals()
    | st.uuids()
    | st.builds(path, st.sampled_from([Path, PurePosixPath, PureWindowsPath]), st.text(max_size=6))
    | st.binary(max_size=6).map(bytearray)
    | st.builds(stream, st.binary(max_size=6), st.integers(0, 9))
    | st.builds(slice, st.integers(), st.none() | st.integers(), st.integers())
    | st.builds(range, st.integers(), st.integers(), st.integers(1))
)
HASHABLE = st.integers() | st.text(max_size=3) | st.dates() | st.decimals(allow_nan=False) | st.uuids()
VALUES = st.recursive(
    fst.plain_values() | NUMPY | DATA,
    lambda values: (
        st.lists(values, max_size=3)
        | st.lists(values, max_size=3).map(tuple)
        | st.dictionaries(st.text("~ab", max_size=3) | HASHABLE, values, max_size=3)
        | st.dictionaries(HASHABLE, values, max_size=3).map(OrderedDict)
        | st.builds(
            defaultdict, st.sampled_from([None, int, list, dict]), st.dictionaries(HASHABLE, values, max_size=2)
        )
        | st.builds(deque, st.lists(values, max_size=3), st.none() | st.integers(3, 5))
        | st.frozensets(HASHABLE, max_size=3)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(HASHABLE, st.integers(0, 3), max_size=3).map(Counter)
    ),
    max_leaves=6,
)


def described(value):
    """Return a text that tells apart what equality does not: types, byte orders, NaNs, positions."""
    name = type(value).__name__
    if isinstance(value, np.ndarray | np.generic):
        return f"{name} {value.dtype.str} {value.dtype} {value.shape} {value.tobytes()!r}"
    if isinstance(value, np.str_ | np.bytes_):
        return f"{name} {list(value)}"
    if isinstance(value, dict):
        pairs = [f"{described(k)}: {described(v)}" for k, v in value.items()]
        kept = pairs if isinstance(value, OrderedDict) else sorted(pairs)
        return f"{name} {getattr(value, 'default_factory', None)} {kept}"
    if isinstance(value, set | frozenset):
        return f"{name} {sorted(map(described, value))}"
    if isinstance(value, list | tuple | deque):
        return f"{name} {getattr(value, 'maxlen', None)} {list(map(described, value))}"
    if isinstance(value, slice):
        return f"slice {described((value.start, value.stop, value.step))}"
    if isinstance(value, io.BytesIO):
        return f"{name} {value.getvalue()!r} {value.tell()}"
    return f"{name} {value!r} {getattr(value, 'fold', None)}"


EXAMPLES = (
    np.random.get_state(), np.random.default_rng(3).bit_generator.state, (datetime(2020, 1, 1, fold=1),),
    np.str_("a\0"), np.bytes_(b"a\0"), np.array(3, ">u2"),
    Decimal("sNaN12"), uuid.UUID(int=3), range(2**70), ({1: np.float32(2)},),
    np.array(3), np.zeros((0, 2**40)), np.datetime64("NaT"), stream(b"ab", 1), ["x" * MAX_INLINE_NBYTES],
    np.zeros(MAX_INLINE_NBYTES, "u1"), tuple(range(MAX_INLINE_NBYTES)),
)  # fmt: skip


def examples(law):
    for value in EXAMPLES:
        law = example(value)(law)
    return law


@examples
@given(VALUES)
def test_values_survive_json(value):
    text = plain_text(value)
    assert text is not None
    found = decode_text("key", text)
    assert described(found) == described(value)
    assert plain_text(found) == text


@FEWER
@examples
@given(VALUES)
def test_values_come_back_from_a_checkpoint(value):
    url = f"memory://values-{next(counter)}"
    functional_ckpt.save({"v": (value,)}, url)
    assert described(functional_ckpt.load({"v": None}, url)["v"]) == described((value,))
    assert described(functional_ckpt.open_checkpoint(url).state()["v"]) == described((value,))
    assert functional_ckpt.verify(url).ok


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@FEWER
@examples
@given(VALUES)
def test_values_come_back_through_dcp(value):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    storage = pytest.importorskip("functional_ckpt.torch.dcp.storage_writer")
    planner = pytest.importorskip("functional_ckpt.torch.dcp.planner")
    url = f"memory://values-{next(counter)}"
    dcp.save({"v": (value,)}, storage_writer=storage.ZarrStorageWriter(url))
    for rules in (None, planner.StrictLoadPlanner()):
        found = {"v": 0}
        dcp.load(found, storage_reader=storage.ZarrStorageReader(url), planner=rules)
        assert described(found["v"]) == described((value,))
    assert described(functional_ckpt.load({"v": None}, url)["v"]) == described((value,))


TAGS = st.sampled_from([*DATA_DECODERS, "~set", "~dict", "~deque", "~slice", "~range", "~defaultdict", "~counter"])
BODIES = st.recursive(
    fst.json_values() | st.sampled_from(["float32", "<U3", "|O", "O", "<f16", "V8", "M8[s]", "AAAA", 2**70]),
    lambda bodies: st.lists(bodies, max_size=3),
    max_leaves=5,
)


@given(TAGS, BODIES)
@example("~numpy.ndarray", ["|O", [1], base64.b64encode(bytes(8)).decode()])
@example("~numpy.ndarray", ["float32", [2**62], ""])
@example("~numpy.ndarray", ["<U999999999", [], ""])
@example("~numpy.ndarray", ["float32", [-1, -1], "AAAAAA=="])
@example("~numpy.generic", ["float32", ""])
@example("~io.BytesIO", ["", -1])
@example("~deque", [[], -1])
@example("~defaultdict", ["eval", []])
@example("~path", 3)
@example("~decimal", "x")
@example("~timedelta", [2**70])
def test_a_body_that_no_value_has_gets_an_error_of_ours(tag, body):
    try:
        value = decode_value(json.loads(json.dumps({tag: body})))
    except CheckpointError as error:
        event(type(error).__name__)
    else:
        assert plain_text(value) is not None


@pytest.mark.parametrize("tag", ["~set", "~frozenset", "~dict", "~counter", "~ordered", "~defaultdict"])
def test_items_of_one_hash_are_refused_before_they_take_minutes(tag):
    """Each new one would be compared with all before it."""
    items = [{"~int": hex(n * (2**61 - 1))} for n in range(20_000)]
    body = items if tag in ("~set", "~frozenset") else [[item, 0] for item in items]
    body = [None, body] if tag == "~defaultdict" else body
    with pytest.raises(CheckpointError, match="one hash"):
        decode_value({tag: body})
    few = {n * (2**61 - 1) for n in range(20)} | {-1, -2}
    assert decode_text("key", canonical(encode_value(few))) == few
