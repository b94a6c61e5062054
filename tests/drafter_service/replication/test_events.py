"""Encoding and decoding of entries; invalid entries are refused."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.replication.events import Event, Kind, decode, encode, forgets, forgets_all
from drafter_service.transport.wire import WireError, pack
from tests.strategies import LARGEST, array, examples, tokens

TIMES = st.floats(allow_nan=False, allow_infinity=False)
EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from(Kind),
        TIMES,
        st.text(max_size=8),
        tokens().map(array),
        st.integers(0, (1 << 16) - 1),
    ),
    min_size=1,
    max_size=8,
)
FIELDS = ["version", "writer", "kinds", "times", "lengths", "tokens", "name_lengths", "names", "tags"]
GOOD = encode(
    [
        Event(Kind.FINISHED, 1.0, "a", array([1, 2])),
        Event(Kind.FORGOTTEN, 2.0, "é"),
        Event(Kind.FINISHED, 3.0, tokens=array([LARGEST])),
    ],
    b"me",
)


def plain(events):
    """Return events in a form that can be compared."""
    return [event._replace(tokens=(event.tokens.dtype, event.tokens.tolist())) for event in events]


def changed(**columns):
    return GOOD | {name.encode(): value for name, value in columns.items()}


@examples(30)
@given(EVENTS, st.binary(max_size=8))
def test_encoded_events_are_decoded_unchanged(events, writer):
    fields = encode(events, writer)
    entry = decode(fields)
    assert (entry.writer, plain(entry.events)) == (writer, plain(events))
    assert forgets(fields) == any(event.kind is not Kind.FINISHED for event in events)
    assert forgets_all(fields) == (events[0].kind is Kind.DROPPED)


@given(st.dictionaries(st.sampled_from(FIELDS).map(str.encode), st.binary(max_size=64)), st.data())
def test_any_bytes_are_decoded_or_refused(columns, data):
    """Arbitrary fields alone, and in place of those of a valid entry, and a valid entry with a changed byte."""
    name = data.draw(st.sampled_from([name for name, column in GOOD.items() if column]))
    column = bytearray(GOOD[name])
    column[data.draw(st.integers(0, len(column) - 1))] = data.draw(st.integers(0, 255))
    right = {b"version": b"1"}
    for fields in (columns, columns | right, GOOD | columns, GOOD | columns | right, GOOD | {name: bytes(column)}):
        try:
            entry = decode(fields)
        except WireError:
            continue
        assert plain(decode(encode(entry.events, entry.writer)).events) == plain(entry.events)


@pytest.mark.parametrize("missing", FIELDS)
def test_every_column_is_required(missing):
    with pytest.raises(WireError, match=missing):
        decode({name: column for name, column in GOOD.items() if name != missing.encode()})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"version": b"2"}, "version"),
        ({"kinds": b"\0\1\4"}, "kinds must be numbers below 4"),
        ({"kinds": b""}, "kinds must be numbers"),
        ({"kinds": b"\0\1"}, "times must be 2"),
        ({"times": pack(np.array([1.0, math.nan, 1.0]), "f8")}, "finite"),
        ({"times": pack(np.array([1.0, 1.0, math.inf]), "f8")}, "finite"),
        ({"times": b"123"}, "times has 3 bytes"),
        ({"lengths": pack(np.array([2, 0, 2]), "u4")}, "the sum 3"),
        ({"lengths": pack(np.array([0xFFFF_FFFF, 0, 4]), "u4")}, "the sum 3"),
        ({"lengths": pack(np.array([3]), "u4")}, "lengths must be 3"),
        ({"tokens": pack(np.array([1, 2, LARGEST + 1]), "u4")}, "token id"),
        ({"name_lengths": pack(np.array([1, 1, 0]), "u4")}, "the sum 3"),
        ({"names": b"a\xff\xff"}, "UTF-8"),
    ],
)
def test_inconsistent_columns_are_refused(columns, message):
    with pytest.raises(WireError, match=message):
        decode(changed(**columns))


def test_false_lengths_do_not_allocate_memory():
    claims = changed(lengths=pack(np.array([0xFFFF_FFFE, 1, 4]), "u4"))
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(claims)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
