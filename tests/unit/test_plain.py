"""What ranks tell each other at set-up: every plain value arrives as it was, and nothing else does."""

from __future__ import annotations

import math
import pickle
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import ConfigError
from commlib.transport.plain import MalformedError, decode, encode

NUMBERS = st.integers() | st.floats(allow_nan=False)
KEYS = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text() | st.binary(), lambda inner: st.tuples(inner, inner), max_leaves=4
)
VALUES = st.recursive(
    KEYS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """Tell apart what compares equal: 1, 1.0 and True; 0.0 and -0.0."""
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    return type(value), repr(value)


@given(VALUES)
def test_every_plain_value_arrives_as_it_was(value: Any) -> None:
    assert typed(decode(encode(value))) == typed(value)


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, 5e-324, -0.0, 2**80, "\ud800", "\x00", ((),), {(1, b"x"): [()]}]
)
def test_the_odd_ones(value: Any) -> None:
    assert typed(decode(encode(value))) == typed(value)


def test_nan_is_nan() -> None:
    assert math.isnan(decode(encode(math.nan)))


def test_a_named_tuple_arrives_as_a_tuple() -> None:
    class Pair(NamedTuple):
        first: float
        second: int

    assert typed(decode(encode(Pair(0.1, 2)))) == typed((0.1, 2))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), r"send value between ranks: it is of type object"),
        ({"a": [1, {2}]}, r"send value\['a'\]\[1\] between ranks: it is of type set"),
        ((ValueError("x"),), r"send value\[0\] between ranks: it is of type ValueError"),
        (1 + 2j, "of type complex"),
    ],
)
def test_what_is_not_plain_is_an_error_that_says_where(value: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        encode(value)


def test_what_refers_to_itself_is_an_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested too deeply"):
        encode(loop)


class Trap:
    """Says so when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"1.5",
        b"NaN",
        b"{}",
        b'{"f": 1}',
        b'{"f": "x"}',
        b'{"f": "0x1p99999"}',
        b'{"b": "!"}',
        b'{"b": 1}',
        b'{"t": {}}',
        b'{"t": "ab"}',
        b'{"d": [[1]]}',
        b'{"d": [[[], 1]]}',
        b'{"d": 3}',
        b'{"?": 1}',
        b'{"t": [], "f": "0x1p0"}',
        b"[" * 100_000,
        b"9" * 10_000,
        pickle.dumps(Trap()),
        pickle.dumps(Trap(), protocol=0),
    ],
)
def test_anything_else_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(data)


@given(st.binary(max_size=64))
def test_random_bytes_are_a_plain_value_or_malformed(data: bytes) -> None:
    try:
        value = decode(data)
    except MalformedError:
        return
    assert typed(decode(encode(value))) == typed(value)
