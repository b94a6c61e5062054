"""The client without a connection: services that answer late or never."""

from tests.drafter_service.core_wire import connected, counting, finish, start
from tests.replay import progress_of


def test_a_late_answer_is_dropped_and_nothing_is_sent_before_it():
    wire = connected(counting)
    start(wire.core, 1, [5])
    wire.settle()
    assert not len(wire.draft(progress_of({1: []}, limit=1), in_time=False).tokens)
    sent = len(wire.upward)
    start(wire.core, 2, [20])
    assert not len(wire.draft(progress_of({1: [6], 2: []}, limit=1), in_time=False).tokens)
    finish(wire.core, 2, [21])
    wire.flush()
    assert len(wire.upward) == sent
    wire.settle()
    assert (wire.core.counters.timeouts, wire.core.counters.dropped) == (2, 1)
    assert list(wire.service.learned.values()) == [[20, 21]]
    assert wire.draft(progress_of({1: [7]}, limit=1)).tokens.tolist() == [8]
    assert wire.service.texts() == [[5, 6, 7]]


def test_a_service_that_is_always_late_is_asked_ever_more_rarely():
    wire = connected(counting)
    start(wire.core, 1, [5])
    wire.settle()
    before = len(wire.service.requests)
    for token in range(6, 506):
        wire.draft(progress_of({1: [token]}, limit=1), in_time=False)
        wire.settle()
    assert 5 <= len(wire.service.requests) - before <= 20
    assert wire.core.counters.timeouts == 500
    until = (wire.draft(progress_of({1: [token]}, limit=1)) for token in range(506, 600))
    assert any(len(drafts.tokens) for drafts in until)
    for token in range(600, 605):  # once in time, it is asked every time
        assert len(wire.draft(progress_of({1: [token]}, limit=1)).tokens) == 1


def test_silence_is_measured_from_the_oldest_message_without_an_answer():
    wire = connected()
    wire.now = 10.0
    assert wire.core.dialogue.silent_s == 0.0
    start(wire.core, 1, [5])
    wire.now = 12.0
    start(wire.core, 2, [5])
    wire.now = 15.0
    assert wire.core.dialogue.silent_s == 5.0
    wire.settle()
    assert wire.core.dialogue.silent_s == 0.0


def test_counters_travel_now_and_then():
    wire = connected(counting)
    start(wire.core, 1, [5])
    wire.draft(progress_of({1: []}, limit=8), in_time=False)
    wire.settle()
    for _ in range(62):
        wire.draft(progress_of({1: [5]}, limit=8))
    assert wire.service.counters is None
    wire.draft(progress_of({1: [5]}, limit=8))
    assert (wire.service.counters.timeouts, wire.service.counters.dropped) == (1, 1)
