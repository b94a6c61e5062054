"""Sequences that the service lost, has no room for, or must learn after their end; and services that answer late."""

from collections import deque

import pytest
from structlog.testing import capture_logs

from drafter_service.client.sequences import RemoteSequence
from drafter_service.stubs import drafter_pb2 as pb
from tests.drafter_service.client_wire import Wire, connected, counting, finish, start
from tests.drafter_service.fake_server import FakeService
from tests.replay import progress_of
from tests.strategies import array


@pytest.fixture
def queue(monkeypatch):
    """Return a function that limits the queue of finished sequences to a number of tokens, and parts to 250."""

    def limited(tokens):
        for name, size in (("QUEUE_BYTES", 4 * tokens), ("SEQUENCE_BYTES", 0), ("PART_BYTES", 4 * 250)):
            monkeypatch.setattr(f"drafter_service.client.sequences.{name}", size)

    return limited


@pytest.fixture
def handled(monkeypatch):
    """Return a set with the ids of all sequences of which anything was read or changed."""
    seen = set()

    def counted(slot):
        def read(sequence):
            seen.add(id(sequence))
            return slot.__get__(sequence)

        return property(read, slot.__set__)

    for name in ("info", "text", "wire_id", "unsent", "end_request"):
        monkeypatch.setattr(RemoteSequence, name, counted(getattr(RemoteSequence, name)))
    return seen


def send_finished(client, texts):
    """Pass sequences to a client that had their drafts from a copy, by name."""
    starts = {name: client.start_message(array([]), request_id=name) for name in texts}
    finished = deque((RemoteSequence(starts[name]), array(text), 1) for name, text in texts.items())
    while finished:
        client.send_finished(finished)


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


def test_what_finishes_at_once_is_sent_before_any_of_it_is_discarded(queue):
    """More than the queue holds, of sequences that had their drafts from a copy."""
    queue(800)
    wire = connected()
    names = [f"r{number}" for number in range(40)]
    send_finished(wire.client, {name: [5] * 100 for name in names})
    wire.settle()
    assert [start.request_id for request in wire.service.requests for start in request.starts] == names
    assert max(len(request.starts) for request in wire.service.requests) == 2
    assert wire.client.counters.unlearned == 0


def test_a_long_queue_is_sent_in_parts_each_when_the_previous_part_was_answered():
    wire = Wire(FakeService())
    names = [f"r{number}" for number in range(1000)]
    send_finished(wire.client, {name: [5] for name in names})
    wire.connect()
    wire.serve()
    wire.deliver()
    for _ in range(20):
        send_finished(wire.client, {f"r{len(names)}": [5]})
        names.append(f"r{len(names)}")
        assert [len(request.finishes) <= 64 for request in wire.requests] == [True]
        wire.serve()
        wire.deliver()
    wire.settle()
    assert list(wire.service.learned) == names


def test_no_call_goes_through_the_queue(handled):
    """The engine's thread may wait for each of them."""
    wire = Wire(FakeService())

    def most(call, *given):
        handled.clear()
        call(*given)
        return len(handled)

    for number in range(1000):
        start(wire.client, number, [number])
        assert most(finish, wire.client, number, [10]) == 1
    wire.connect()
    for number in range(1000, 1030):
        wire.serve(1)
        assert most(wire.deliver, 1) <= 2 * 64
        start(wire.client, number, [number])
        assert most(finish, wire.client, number, [10]) <= 64 + 1
    wire.settle()
    assert len(wire.service.learned) == 1030


def test_a_full_queue_is_not_searched(handled, monkeypatch):
    monkeypatch.setattr("drafter_service.client.sequences.QUEUE_BYTES", 1 << 20)
    client = Wire(FakeService()).client
    for number in range(2000):
        handled.clear()
        send_finished(client, {f"r{number}": [5]})
        assert len(handled) <= 2
    assert 0 < 2000 - client.counters.unlearned <= 1024, "more than 1 KB is counted for each"


def test_a_response_to_several_parts_at_once_sends_one_part():
    wire = Wire(FakeService())
    send_finished(wire.client, {f"r{number}": [5] for number in range(1000)})
    wire.connect()
    wire.serve()
    wire.deliver()
    for number in (1, 2, 3):
        start(wire.client, number, [5])
        finish(wire.client, number, [6])  # Sends a part of the queue.
    wire.serve()
    before = len(wire.responses)
    wire.deliver()
    assert (before, len(wire.requests)) == (7, 1)


def test_ends_are_sent_while_many_other_sequences_have_no_room():
    wire = Wire(FakeService(max_sequences=1))
    wire.connect()
    wire.settle()
    for number in range(200):
        start(wire.client, number, [number])
    for number in range(1, 200):
        finish(wire.client, number, [10])
    wire.settle()
    assert not wire.service.learned
    finish(wire.client, 0, [10])
    wire.settle()
    assert [text[0] for text in wire.service.learned.values()] == [*range(200)]


def test_what_was_sent_is_sent_first_after_a_loss(queue):
    queue(800)
    wire = connected()
    names = [f"r{number}" for number in range(8)]
    send_finished(wire.client, {name: [5] * 100 for name in names})
    wire.serve(1)
    wire.cut()
    wire.connect()
    wire.settle()
    assert list(wire.service.learned) == names
    assert wire.client.counters.unlearned == 0


def test_text_outside_the_vocabulary_of_the_namespace_is_discarded_with_one_warning():
    """A client without a model does not know the vocabulary before the service says it."""
    wire = Wire(FakeService(counting, vocab_size=50))
    send_finished(wire.client, {f"r{number}": [1, 50] for number in range(200)} | {"second": [2]})
    start(wire.client, 1, [60])
    start(wire.client, 2, [3])
    with capture_logs() as logs:
        wire.connect()
        wire.settle()
        send_finished(wire.client, {"third": [70], "fourth": [4]})
        wire.settle()
    assert [each["event"] for each in logs] == ["text with token ids outside the namespace's vocabulary is not used"]
    assert list(wire.service.learned) == ["second", "fourth"]
    assert wire.service.texts() == [[3]]
    assert (wire.client.counters.unlearned, wire.client.counters.reconnects) == (202, 0)


def test_a_running_sequence_ends_at_the_service_with_its_first_token_outside_the_vocabulary():
    wire = Wire(FakeService(counting, vocab_size=50))
    wire.connect()
    wire.settle()
    for number in (1, 2, 3):
        start(wire.client, number, [10 * number])
    wire.settle()
    for _ in range(2):
        drafts = wire.draft(progress_of({1: [11], 2: [50], 3: [31]}, limit=1))
        assert [drafts.tokens_of(index).tolist() for index in range(3)] == [[12], [], [32]]
    wire.draft(progress_of({1: [11], 2: [21], 3: [31]}, limit=1), in_time=False)
    finish(wire.client, 1, [12, 50])
    finish(wire.client, 2, [22])
    finish(wire.client, 3, [32])
    wire.settle()
    assert list(wire.service.learned.values()) == [[30, 31, 31, 31, 32]]
    assert wire.service.texts() == []
    assert wire.client.counters.unlearned == 2


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


def test_the_queue_of_ends_is_bounded(queue):
    queue(300)
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


def test_a_full_queue_discards_ends_that_were_sent_before_older_ones(queue):
    queue(800)
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


def test_counters_are_sent_periodically_and_a_new_stream_says_which_were_answered():
    wire = connected(counting)
    assert wire.service.requests[0].hello.HasField("counted")
    start(wire.client, 1, [5])
    for sent in (None, pb.ClientCounters(timeouts=1, dropped=1)):
        wire.draft(progress_of({1: []}, limit=8), in_time=False)
        wire.settle()
        for _ in range(62):
            wire.draft(progress_of({1: [5]}, limit=8))
        assert wire.service.counters == sent
        wire.draft(progress_of({1: [5]}, limit=8), in_time=sent is None)
    assert wire.requests[-1].counters == pb.ClientCounters(timeouts=2, dropped=2)
    wire.cut()
    wire.connect()
    assert wire.requests[-1].hello.counted == sent
