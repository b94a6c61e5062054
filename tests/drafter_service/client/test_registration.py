"""Registration of sequences that the service lost, has no room for, or must learn after their end."""

import numpy as np
import pytest

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


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("drafter_service.client.sequences.PART_BYTES", 4 * 250)


def reconnected(numbers, size=100) -> Wire:
    """Return a connection to a service that has lost the running sequences and has not answered the handshake."""
    wire = connected(counting)
    for number in numbers:
        start(wire.client, number, [number] * size)
    wire.settle()
    wire.cut()
    wire.connect()
    return wire


@pytest.mark.usefixtures("small_parts")
def test_registered_sequences_have_drafts_while_others_are_registered():
    numbers = range(1, 9)
    wire = reconnected(numbers)
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


def crowd(numbers, token, limit=1):
    return progress_of({number: [token] for number in numbers}, limit=limit)


@pytest.mark.parametrize("size", [100, 30])
def test_a_full_service_drafts_for_the_sequences_that_fit(size):
    """The others are not registered again in each step, since that would drop those that fit."""
    wire = Wire(FakeService(counting, max_tokens=1000))
    wire.connect()
    wire.settle()
    fitting = 930 // size
    numbers = range(fitting + 5)
    for number in numbers:
        start(wire.client, number, [number] * size)
    for step in range(10):
        drafts = wire.draft(crowd(numbers, step))
        assert np.count_nonzero(np.diff(drafts.offsets)) >= 0.8 * fitting
    assert sum(len(request.starts) for request in wire.service.requests) <= fitting + 3
    assert sum(map(len, wire.service.texts())) <= 1000
    for number in numbers[: fitting - 1]:  # When there is room again, the others are registered.
        finish(wire.client, number, [])
    wire.settle()
    rest = numbers[fitting - 1 :]
    wire.draft(crowd(rest, 0))
    drafts = wire.draft(crowd(rest, 0))
    assert np.count_nonzero(np.diff(drafts.offsets)) == len(rest)
    wire.settle()
    assert len(wire.service.learned) == fitting - 1


def test_no_more_sequences_are_registered_than_the_service_keeps():
    wire = Wire(FakeService(counting, max_sequences=3))
    wire.connect()
    wire.settle()
    for number in range(5):
        start(wire.client, number, [number])
    for step in range(5):
        drafts = wire.draft(crowd(range(5), step))
        assert np.diff(drafts.offsets).tolist() == [1, 1, 1, 0, 0]


def test_after_a_restart_the_sequences_that_fit_are_registered():
    wire = connected(counting)
    for number in range(15):
        start(wire.client, number, [number] * 100)
    wire.settle()
    assert len(wire.service.texts()) == 15
    wire.cut()
    wire.service.max_tokens = 1000
    before = len(wire.service.requests)
    wire.connect()
    wire.settle()
    for step in range(5):
        wire.draft(crowd(range(15), step))
    assert sum(len(request.starts) for request in wire.service.requests[before:]) == 9
    assert wire.service.evicted == 0


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


@pytest.mark.usefixtures("small_parts")
def test_many_ends_are_sent_in_parts():
    wire = Wire(FakeService())
    for number in range(6):
        start(wire.client, number, [number] * (90 if number else 900))
        finish(wire.client, number, [number] * 10)
    wire.connect()
    wire.serve()
    wire.deliver()
    for finishes in (1, 2, 2, 1):
        [request] = wire.requests
        assert len(request.finishes) == finishes
        wire.serve()
        wire.deliver()
    assert not wire.requests


def test_an_end_waits_until_there_is_room():
    wire = Wire(FakeService(counting, max_tokens=1000))
    wire.connect()
    wire.settle()
    start(wire.client, 3, [3] * 800)
    wire.settle()
    wire.service.sequences.clear()
    wire.draft(crowd([3], 3))  # The service reports that it is lost.
    assert len(wire.service.texts()) == 1
    start(wire.client, 4, [4] * 300)  # There is no room for it.
    finish(wire.client, 4, [])
    wire.settle()
    assert len(wire.service.learned) == 0
    finish(wire.client, 3, [])
    wire.settle()
    assert len(wire.service.learned) == 2
    assert wire.service.evicted == 0


@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize("limit", ["message", "room"])
def test_an_end_that_exceeds_the_limits_is_discarded(monkeypatch, is_registered, limit):
    """It would break every stream on which it is sent."""
    if limit == "message":
        monkeypatch.setattr("drafter_service.client.sequences.MAX_TEXT_BYTES", 4 * 100)
    wire = Wire(FakeService(counting, max_tokens=100 if limit == "room" else 0))
    if is_registered:
        wire.connect()
        wire.settle()
    start(wire.client, 1, [1] * 60)
    if is_registered:
        wire.settle()
    finish(wire.client, 1, [2] * (101 if limit == "message" else 60))
    if not is_registered:
        wire.connect()
    wire.settle()
    start(wire.client, 2, [3] * 10)
    finish(wire.client, 2, [4])
    wire.settle()
    is_learned = is_registered and limit == "room"  # Only its end is sent, which fits.
    assert len(wire.service.learned) == 1 + is_learned
    assert wire.client.counters.unlearned == (not is_learned)
    assert wire.service.texts() == []
    assert not wire.client.pending.has_pending


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
