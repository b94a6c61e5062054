"""Encoding and decoding of entries; invalid entries are refused."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.replication.events import Dropped, Finished, Forgotten, ForgottenBefore, decode, encode
from drafter_service.transport.wire import WireError, pack
from tests.strategies import LARGEST, array, tokens

TIMES = st.floats(allow_nan=False, allow_infinity=False)
EVENTS = st.lists(
    st.builds(Finished, st.text(max_size=8), tokens().map(array), TIMES, st.integers(0, (1 << 16) - 1))
    | st.builds(Forgotten, st.text(max_size=8), TIMES)
    | st.builds(ForgottenBefore, TIMES)
    | st.builds(Dropped, TIMES),
    min_size=1,
    max_size=8,
)
FIELDS = ["version", "writer", "kinds", "times", "lengths", "tokens", "name_lengths", "names", "tags"]
GOOD = encode([Finished("a", array([1, 2]), 1.0), Forgotten("é", 2.0), Finished("", array([LARGEST]), 3.0)], b"me")


def plain(event):
    """Return an event in a form that can be compared."""
    if isinstance(event, Finished):
        return event.request, event.tokens.dtype, event.tokens.tolist(), event.time, event.tag
    return event


def changed(**columns):
    return GOOD | {name.encode(): value for name, value in columns.items()}


@given(EVENTS, st.binary(max_size=8))
def test_encoded_events_are_decoded_unchanged(events, writer):
    entry = decode(encode(events, writer))
    assert entry.writer == writer
    assert [plain(event) for event in entry.events] == [plain(event) for event in events]


@given(st.dictionaries(st.sampled_from(FIELDS).map(str.encode), st.binary(max_size=64)))
def test_any_bytes_are_decoded_or_refused(columns):
    """Arbitrary fields alone, and in place of those of a valid entry, are decoded or refused."""
    for fields in (columns, columns | {b"version": b"1"}, GOOD | columns, GOOD | columns | {b"version": b"1"}):
        try:
            entry = decode(fields)
        except WireError:
            continue
        assert [plain(event) for event in decode(encode(entry.events, entry.writer)).events] == [
            plain(event) for event in entry.events
        ]


@given(st.data())
def test_an_entry_with_a_changed_byte_is_decoded_or_refused(data):
    name = data.draw(st.sampled_from([name for name, column in GOOD.items() if column]))
    column = bytearray(GOOD[name])
    column[data.draw(st.integers(0, len(column) - 1))] = data.draw(st.integers(0, 255))
    try:
        entry = decode(GOOD | {name: bytes(column)})
    except WireError:
        return
    assert len(entry.events) == 3
    assert sum(len(event.tokens) for event in entry.events if isinstance(event, Finished)) <= 3


@pytest.mark.parametrize("missing", FIELDS)
def test_every_column_is_required(missing):
    with pytest.raises(WireError, match=missing):
        decode({name: column for name, column in GOOD.items() if name != missing.encode()})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"version": b"2"}, "version"),
        ({"kinds": b"\0\1\4"}, "kinds contains 4"),
        ({"kinds": b""}, "kinds is empty"),
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


@pytest.mark.parametrize("time", [math.nan, math.inf])
def test_forgetting_needs_a_finite_time(time):
    with pytest.raises(ValueError, match="not finite"):
        ForgottenBefore(time)
