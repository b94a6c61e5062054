"""Sequences that the service lost, has no room for, or must learn after their end; and services that answer late."""

from collections import deque

from drafter_service.client.sequences import RemoteSequence
from tests.drafter_service.client_wire import Wire, connected, counting, finish, start
from tests.drafter_service.fake_server import FakeService
from tests.replay import progress_of
from tests.strategies import array


def test_a_sequence_that_the_service_dropped_is_registered_again():
    wire = connected(counting)
    for number in (1, 2):
        start(wire.client, number, [10 * number], session_id="s", request_id=f"r{number}", learn=number == 1)
    wire.settle()
    del wire.service.sequences[wire.service.requests[-1].starts[0].sequence_id]
    drafts = wire.draft(progress_of({1: [11], 2: [21]}, limit=1))
    assert [drafts.tokens_of(index).tolist() for index in (0, 1)] == [[12], []]
    assert wire.draft(progress_of({2: [22], 1: [12]}, limit=1)).tokens.tolist() == [23, 13]
    [again] = wire.service.requests[-2].starts
    assert (again.request_id, again.session_id, again.learn) == ("r2", "s", False)
    assert again.committed == array([21]).tobytes()
    assert wire.client.counters.resyncs == 1


def test_what_finishes_at_once_is_sent_before_any_of_it_is_discarded(monkeypatch):
    """More than the queue holds, of sequences that had their drafts from a copy."""
    for name, size in (
        ("sequences.QUEUE_BYTES", 4 * 800),
        ("sequences.PART_BYTES", 4 * 250),
        ("protocol.PART_BYTES", 4 * 250),
    ):
        monkeypatch.setattr(f"drafter_service.client.{name}", size)
    wire = connected()
    names = [f"r{number}" for number in range(40)]
    sequences = (RemoteSequence(wire.client.start_message(array([]), request_id=name)) for name in names)
    wire.client.send_finished(deque((sequence, array([5] * 100), 50) for sequence in sequences))
    wire.settle()
    assert [start.request_id for request in wire.service.requests for start in request.starts] == names
    assert max(len(request.starts) for request in wire.service.requests) == 2
    assert wire.client.counters.unlearned == 0


def test_registered_sequences_have_drafts_while_others_are_registered(monkeypatch):
    monkeypatch.setattr("drafter_service.client.sequences.PART_BYTES", 4 * 250)
    wire, numbers = connected(counting), range(1, 9)
    for number in numbers:
        start(wire.client, number, [number] * 100)
    wire.settle()
    wire.cut()
    wire.connect()
    wire.serve(1)
    wire.deliver()
    for registered in (2, 4, 6):
        assert [len(one.starts) for one in wire.requests] == [2]
        turn = wire.client.draft(progress_of({number: [number] for number in numbers}, limit=1))
        for _ in range(2):
            wire.serve(1)
            wire.deliver()
        # The next part was sent when the previous part was answered, after the batch.
        assert [len(one.starts) for one in wire.requests] == [2]
        assert len(wire.client.settle(turn).tokens) == registered


def test_a_sequence_longer_than_a_message_has_no_drafts(monkeypatch):
    monkeypatch.setattr("drafter_service.client.sequences.MAX_TEXT_BYTES", 4 * 10)
    wire = connected(counting)
    start(wire.client, 1, [1] * 11)
    start(wire.client, 2, [1] * 10)
    drafts = wire.draft(progress_of({1: [], 2: []}, limit=1))
    assert [drafts.tokens_of(index).tolist() for index in (0, 1)] == [[], [2]]


def test_unanswered_ends_are_sent_again_in_order_if_they_are_to_be_learned():
    wire = connected(counting)
    for number in range(1, 5):
        start(wire.client, number, [number])
        finish(wire.client, number, [10], learn=number != 4)
    wire.cut()
    wire.connect()
    wire.settle()
    assert list(wire.service.learned.values()) == [[1, 10], [2, 10], [3, 10]]
    assert sum(len(request.starts) for request in wire.service.requests) == 3


def test_the_queue_of_ends_is_bounded(monkeypatch):
    monkeypatch.setattr("drafter_service.client.sequences.QUEUE_BYTES", 4 * 300)
    wire = Wire(FakeService())
    for number in range(5):
        start(wire.client, number, [number] * 90)
        finish(wire.client, number, [number] * 10)
    start(wire.client, 9, [9])
    finish(wire.client, 9, [9], learn=False)
    wire.connect()
    wire.settle()
    assert sorted(wire.service.learned.values()) == [[number] * 100 for number in (2, 3, 4)]
    assert wire.client.counters.unlearned == 2


def test_a_full_queue_discards_ends_that_were_sent_before_older_ones(monkeypatch):
    monkeypatch.setattr("drafter_service.client.sequences.QUEUE_BYTES", 4 * 800)
    wire = Wire(FakeService(max_tokens=1000))
    wire.connect()
    wire.settle()
    start(wire.client, 1, [1] * 500)
    wire.settle()
    for number, size in ((2, 600), (3, 90), (4, 90)):  # There is no room for the first.
        start(wire.client, number, [number] * size)
        finish(wire.client, number, [number] * 10)
    wire.settle()
    assert [len(text) for text in wire.service.learned.values()] == [100, 100]
    assert wire.client.counters.unlearned == 0


def test_forget_applies_to_unsent_sequences():
    wire = Wire(FakeService())
    for number, name in ((1, "secret"), (2, "other"), (3, "secret")):
        start(wire.client, number, [number], request_id=name)
    finish(wire.client, 1, [10])
    finish(wire.client, 2, [10])
    wire.client.forget("secret")
    wire.connect()
    wire.settle()
    finish(wire.client, 3, [10])
    wire.settle()
    assert wire.service.learned == {"other": [2, 10]}
    assert wire.service.texts() == []


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
