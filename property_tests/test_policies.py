"""W: a policy says at once which of its fields cannot be; one that is made can be hashed, copied and compared."""

import copy
import math
from typing import Literal, get_args, get_origin, get_type_hints

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from functional_ckpt import LayoutPolicy, LoadPolicy, SavePolicy, StorePolicy, Strict
from functional_ckpt.errors import PolicyError

KINDS = (SavePolicy, LoadPolicy, LayoutPolicy, Strict, StorePolicy)
FIELDS = [(kind, field.name) for kind in KINDS for field in attrs.fields(kind)]
# Each law runs once per field.
FEWER = settings(max_examples=settings.default.max_examples // 3)


class Unhashable:
    __hash__ = None

    def __call__(self, *_):
        return True


def is_text(value):
    return isinstance(value, str)


def is_flag(value):
    return isinstance(value, bool)


def is_whole(value):
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value):
    return is_whole(value) or (isinstance(value, float | np.floating) and math.isfinite(value))


def is_function(value):
    return callable(value) and not isinstance(value, Unhashable)


def is_sequence(value):
    return isinstance(value, list | tuple | set | frozenset | Once)


# Field -> whether a value is of a type that the field takes; of those some are refused too.
TYPES = {
    "layout": lambda value: isinstance(value, LayoutPolicy),
    "store": lambda value: isinstance(value, StorePolicy),
    **dict.fromkeys(
        [
            "replicas",
            "replicated",
            "durability",
            "commit",
            "foreign",
            "in_flight",
            "staging",
            "cast",
            "verify",
            "missing",
            "unexpected",
        ],
        is_text,
    ),
    **dict.fromkeys(["extended_dtypes", "credentials"], is_text),
    **dict.fromkeys(["endpoint", "region"], lambda value: value is None or is_text(value)),
    **dict.fromkeys(["consolidate", "metadata_file", "allow_shape_mismatch", "alone"], is_flag),
    "staging_nbytes": lambda value: value is None or is_whole(value),
    "read_once": lambda value: value is None or is_flag(value),
    **dict.fromkeys(
        ["budget_nbytes", "target_chunk_nbytes", "min_chunk_nbytes", "shared_chunk_nbytes", "few_files"], is_whole
    ),
    **dict.fromkeys(["timeout_s", "retry_delay_s", "lease_s"], is_number),
    **dict.fromkeys(["retries", "concurrency"], is_whole),
    "object_codec": lambda value: value is None or is_text(value),
    "strict": lambda value: is_text(value) or is_flag(value) or isinstance(value, Strict),
    "keys": lambda value: value is None or is_text(value) or is_function(value) or is_sequence(value),
    "rename": lambda value: value is None or is_function(value) or is_sequence(value) or isinstance(value, dict),
    "per_rank": lambda value: is_text(value) or is_function(value),
    "safe_globals": lambda value: is_text(value) or isinstance(value, type) or is_sequence(value),
    "device": is_text,
    "codecs": lambda value: is_sequence(value) or isinstance(value, dict),
}


@attrs.frozen(eq=False)
class Once:
    """Can be iterated once, as a generator can; a generator itself says nothing when a test fails."""

    items: tuple
    _used: list = attrs.field(factory=list)

    def __iter__(self):
        left = () if self._used else self.items
        self._used.append(True)
        return iter(left)


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**40),
    st.floats(),
    st.text("ab.", max_size=3),
    st.sampled_from(
        ["auto", "fsync", "keep", "refuse", "queue", "elect", "declared", "none", "error", "any", "raise", "report",
         "ignore", "first", "trust", "torch", "native", "bits", "zstd", "crc32c", "cpu", "full"]
    ),
    st.binary(max_size=2),
)  # fmt: skip
ODD = st.sampled_from(
    [object(), Unhashable(), len, str, dict, np.zeros(2), np.zeros(()), np.int64(7), np.float32(2.5), np.str_("a"),
     np.bool_(True), range(3), Strict(), LayoutPolicy(), 10**400, Exception]
)  # fmt: skip


def nested(values):
    keys = st.one_of(st.text("ab.", max_size=2), st.integers(0, 1))
    return st.one_of(
        st.lists(values, max_size=3),
        st.lists(values, max_size=3).map(tuple),
        st.lists(values, max_size=2).map(tuple).map(Once),
        st.dictionaries(keys, values, max_size=2),
        st.frozensets(st.text("ab", max_size=1), max_size=2),
    )


VALUES = st.recursive(st.one_of(PLAIN, ODD), nested, max_leaves=4)


def made(kind, name, value):
    """Return the policy, or the error that refuses it."""
    try:
        return kind(**{name: value})
    except PolicyError as error:
        return error


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
@FEWER
@given(VALUES)
@example(["crc32c"])
@example("no")
@example([str])
@example(None)
@example(float("nan"))
@example([["a", "b"]])
@example([["a", "zstd"], "ab"])
@example({"a": ["zstd", ["crc32c"]]})
def test_a_field_takes_a_value_or_says_why_not(kind, name, value):
    result = made(kind, name, value)
    if isinstance(result, PolicyError):
        assert str(result)
        return
    assert TYPES[name](value)
    assert hash(result) == hash(copy.copy(result)) == hash(attrs.evolve(result))
    assert result == copy.copy(result) == attrs.evolve(result)


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
@FEWER
@given(VALUES)
def test_a_value_of_a_wrong_type_is_refused_by_the_words_of_the_field(kind, name, value):
    if TYPES[name](value):
        return
    with pytest.raises(PolicyError) as caught:
        kind(**{name: value})
    error = caught.value
    assert f"{kind.__name__} does not accept this {name}" in str(error)
    assert error.expected
    assert error.found
    assert len(str(error)) < 500


def words(kind, name):
    """Return the words of the `Literal` types in an annotation."""
    whole = get_type_hints(kind)[name]
    return [word for part in (whole, *get_args(whole)) if get_origin(part) is Literal for word in get_args(part)]


WORDS = {(kind, name): found for kind, name in FIELDS if (found := words(kind, name))}


@pytest.mark.parametrize(("kind", "name"), WORDS, ids=lambda value: getattr(value, "__name__", value))
@given(st.text(max_size=8) | st.sampled_from(["auto", "none", "Error", "fsync ", "raise", "first"]))
def test_the_words_of_a_type_are_those_that_the_field_takes(kind, name, other):
    for word in WORDS[kind, name]:
        assert getattr(kind(**{name: word}), name) == word
    if other not in WORDS[kind, name]:
        assert isinstance(made(kind, name, other), PolicyError)


def test_fields_with_words():
    assert {name for _, name in WORDS} == {
        "replicas", "replicated", "durability", "commit", "foreign", "in_flight", "staging", "object_codec", "cast",
        "verify", "credentials", "per_rank", "safe_globals", "extended_dtypes", "missing", "unexpected",
    }  # fmt: skip
