"""Requests are learned once, and not after they have been forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from drafter_service.replication import reader
from drafter_service.replication.events import Dropped, Finished, Forgotten, ForgottenBefore
from drafter_service.replication.reader import RecentNames
from drafter_service.replication.redis_stream import LogCounters
from ssd.corpus.requests import hash_of
from tests.strategies import array

NAMES = st.sampled_from(["a", "b", ""])
TIMES = st.integers(0, 3).map(float)
EVENTS = st.lists(
    st.builds(lambda name, time: finished(name, time), NAMES, TIMES)
    | st.builds(Forgotten, NAMES.filter(bool), TIMES)
    | st.builds(ForgottenBefore, TIMES)
    | st.builds(Dropped, TIMES),
    min_size=6,
    max_size=12,
)


def finished(name, time=5.0):
    return Finished(name, array([1]), time)


def passed(events, known=()):
    window = RecentNames(LogCounters(), known)
    return [window.is_new(event) for event in events]


def naive(events):
    """Return whether each event passes, by searching all earlier events."""
    passes = []
    for index, event in enumerate(events):
        if not isinstance(event, Finished):
            passes.append(True)
            continue
        earlier = events[:index]
        outdated = any(
            (isinstance(other, Forgotten) and other.request == event.request and event.time <= other.time)
            or (isinstance(other, ForgottenBefore | Dropped) and event.time < other.time)
            for other in earlier
        )
        is_known = False
        for other, passed_before in zip(earlier, passes, strict=True):
            if isinstance(other, Finished) and other.request == event.request != "" and passed_before:
                is_known = True
            elif isinstance(other, Dropped) or (isinstance(other, Forgotten) and other.request == event.request):
                is_known = False
        passes.append(not outdated and not is_known)
    return passes


@given(EVENTS)
def test_filter_agrees_with_a_search_through_all_events(events):
    assert passed(events) == naive(events)


def test_requests_of_a_snapshot_are_not_new():
    assert passed([finished("a"), finished("b")], known=[hash_of("a")]) == [False, True]


def test_only_the_newest_names_are_kept(monkeypatch):
    monkeypatch.setattr(reader, "MAX_NAMES", 2)
    names = ["a", "b", "a", "c", "b", "a"]
    # The third event makes "a" newer than "b". Then "c" replaces "b", and "b" replaces "a".
    assert passed([finished(name) for name in names]) == [True, True, False, True, True, True]
    forgets = [Forgotten(name, 9.0) for name in "abc"]
    assert passed([*forgets, finished("a"), finished("b")]) == [True, True, True, True, False]
