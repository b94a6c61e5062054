"""Pending requests of services that answer late or never."""

from tests.drafter_service.client_wire import connected, counting, start
from tests.replay import progress_of


def test_a_service_that_is_always_late_is_called_less_often():
    wire = connected(counting)
    start(wire.client, 1, [5])
    wire.settle()
    before = len(wire.service.requests)
    for token in range(6, 506):
        wire.draft(progress_of({1: [token]}, limit=1), in_time=False)
        wire.settle()
    assert 5 <= len(wire.service.requests) - before <= 20
    assert wire.client.counters.timeouts == 500
    until = (wire.draft(progress_of({1: [token]}, limit=1)) for token in range(506, 600))
    assert any(len(drafts.tokens) for drafts in until)
    for token in range(600, 605):  # After one response in time the service is called in every step.
        assert len(wire.draft(progress_of({1: [token]}, limit=1)).tokens) == 1


def test_a_late_response_behind_much_text_does_not_count():
    """Otherwise a service would be called less often just when sequences are registered again."""
    wire = connected(counting)
    start(wire.client, 1, [1])
    wire.settle()
    for number in range(2, 20):
        start(wire.client, number, [number] * 4000)
        assert not len(wire.draft(progress_of({1: [1]}, limit=1), in_time=False).tokens)
        wire.settle()
    assert wire.client.counters.timeouts == 18
    assert wire.draft(progress_of({1: [1]}, limit=1)).tokens.tolist() == [2]


def test_counters_are_sent_periodically():
    wire = connected(counting)
    start(wire.client, 1, [5])
    wire.draft(progress_of({1: []}, limit=8), in_time=False)
    wire.settle()
    for _ in range(62):
        wire.draft(progress_of({1: [5]}, limit=8))
    assert wire.service.counters is None
    wire.draft(progress_of({1: [5]}, limit=8))
    assert (wire.service.counters.timeouts, wire.service.counters.dropped) == (1, 1)
