"""The log of requests: spans, removal by id and by age, and its size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.corpus.requests import NO_NAME, Forget, RequestLog, hash_of


def log_of(*rows):
    log = RequestLog()
    for row in rows:
        log.add(*row)
    return log


def test_request_ids_are_hashed():
    assert hash_of(None) == NO_NAME
    assert hash_of("a") == hash_of("a") != hash_of("b")
    assert hash_of("") != NO_NAME
    assert -(1 << 63) <= hash_of("ä\ud800") < 1 << 63


def test_requests_without_an_id_are_not_forgotten_by_id():
    assert not Forget(name=NO_NAME).covers(NO_NAME, 0.0)
    assert len(log_of((0, NO_NAME, 0.0)).spans_of([Forget(name=NO_NAME)], 10)) == 0


def test_a_request_ends_where_the_next_begins():
    log = log_of((0, 1, 0.0), (5, 2, 1.0), (9, 1, 2.0))
    forgets = [Forget(name=1)]
    assert log.spans_of(forgets, 20).tolist() == [[0, 5], [9, 20]]
    log.remove(forgets)
    assert log.rows["first"].tolist() == [5]


def test_old_requests_are_removed_by_their_time():
    log = log_of((0, 1, 10.0), (5, 2, 11.0), (9, 3, 12.0))
    forgets = [Forget(before=11.0)]
    assert log.spans_of(forgets, 20).tolist() == [[0, 5]]
    log.remove(forgets)
    assert log.spans_of(forgets, 20).tolist() == []


def test_requests_before_a_position_are_dropped():
    log = log_of((0, 1, 0.0), (5, 2, 0.0), (9, 3, 0.0))
    log.drop_before(4)
    assert len(log) == 3
    log.drop_before(5)
    assert log.rows["first"].tolist() == [5, 9]
    log.drop_before(100)
    assert log.rows["first"].tolist() == [9]  # the log does not know where the newest one ends


@pytest.mark.parametrize("kept", [1, 700])
def test_a_log_stays_small_when_it_drops_as_it_grows(kept):
    log = RequestLog()
    for number in range(20_000):
        log.add(10 * number, number, float(number))
        log.drop_before(10 * (number - kept))
    assert log.rows["name"].tolist() == list(range(19_999 - kept, 20_000))
    assert log.nbytes <= 4 * 24 * 1024


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 9))), st.integers(1, 3), st.integers(0, 9)
)
def test_removal_agrees_with_a_list(requests, name, before):
    log, first, spans, kept = RequestLog(), 0, [], []
    forgets = [Forget(name=name), Forget(before=float(before))]
    for size, request_name, time in requests:
        log.add(first, request_name, float(time))
        is_removed = request_name == name or time < before
        assert any(forget.covers(request_name, float(time)) for forget in forgets) == is_removed
        if is_removed:
            spans.append([first, first + size])
        else:
            kept.append(first)
        first += size
    removed = log.spans_of(forgets, first)
    assert removed.tolist() == spans
    assert removed.dtype == np.int64
    log.remove(forgets)
    assert log.rows["first"].tolist() == kept
