"""Indices of sessions that are kept between two turns."""

import numpy as np
import pytest

from ssd.sequences.local_index import LocalIndex
from ssd.sequences.running import Idle, IdleSessions


def idle_of(size):
    local = LocalIndex(8)
    local.extend(np.zeros(size, np.uint32))
    return Idle(local, frozenset(), 0.0)


def kept(sessions, *names):
    """Remove sessions; return the names of those that were kept."""
    return [name for name in names if sessions.pop(name)]


def test_the_longest_idle_sessions_are_dropped_first():
    sessions = IdleSessions(2, 1000)
    for name in ("one", "two", "one", "three"):
        sessions.keep(name, idle_of(1))
    assert kept(sessions, "one", "two", "three") == ["one", "three"]


@pytest.mark.parametrize(("last", "expected"), [(10, ["two", "three"]), (60, ["three"]), (100, ["three"]), (101, [])])
def test_sessions_are_dropped_until_the_tokens_fit(last, expected):
    sessions = IdleSessions(10, 100)
    for name, size in (("one", 50), ("two", 50), ("three", last)):
        sessions.keep(name, idle_of(size))
    assert kept(sessions, "one", "two", "three") == expected


def test_removed_and_replaced_sessions_are_not_counted():
    sessions = IdleSessions(10, 100)
    for _ in range(5):
        sessions.keep("one", idle_of(60))
        assert sessions.pop("one")
        assert sessions.pop("one") is None
        sessions.keep("two", idle_of(60))
    sessions.keep("one", idle_of(40))
    assert sessions.nbytes > 0
    sessions.drop(lambda idle: idle.local.size == 60)
    sessions.keep("three", idle_of(60))
    assert kept(sessions, "one", "two", "three") == ["one", "three"]
    assert sessions.nbytes == 0
