"""The client without a connection: what a service has lost, or has no room for, and what it is told again."""

import numpy as np
import pytest

from tests.drafter_service.core_wire import Wire, connected, counting, finish, start
from tests.drafter_service.fake_server import FakeService
from tests.replay import progress_of
from tests.strategies import array


def test_what_a_service_still_has_is_not_told_again():
    wire = connected(counting)
    start(wire.core, 1, [5])
    wire.draft(progress_of({1: [6, 7]}, limit=2))
    wire.cut()
    assert not len(wire.draft(progress_of({1: [8]}, limit=2)).tokens)
    wire.connect()
    wire.settle()
    assert wire.draft(progress_of({1: [9]}, limit=2)).tokens.tolist() == [10, 11]
    last = wire.service.requests[-1]
    assert not last.starts
    assert last.batch.tokens == array([8, 9]).tobytes()
    assert wire.service.texts() == [[5, 6, 7, 8, 9]]
    assert (wire.core.counters.reconnects, wire.core.counters.resyncs) == (1, 0)


def test_what_a_service_has_lost_is_told_again_when_it_is_needed():
    wire = connected(counting)
    for number in (1, 2):
        start(wire.core, number, [10 * number])
    wire.draft(progress_of({1: [11], 2: [21]}, limit=1))
    wire.cut()
    wire.service.sequences.clear()
    wire.connect()
    wire.settle()
    assert wire.service.texts() == []
    assert not len(wire.draft(progress_of({2: [22]}, limit=1)).tokens)
    assert wire.service.texts() == [[20, 21, 22]]
    assert wire.draft(progress_of({2: [23]}, limit=1)).tokens.tolist() == [24]
    assert (wire.core.counters.reconnects, wire.core.counters.resyncs) == (1, 2)


def test_one_lost_sequence_is_told_again_before_the_next_batch():
    wire = connected(counting)
    for number in (1, 2):
        start(wire.core, number, [10 * number], session_id="s", request_id=f"r{number}", learn=number == 1)
    wire.settle()
    wire.service.lose(wire.service.requests[-1].starts[0].sequence_id)
    drafts = wire.draft(progress_of({1: [11], 2: [21]}, limit=1))
    assert [drafts.tokens_of(index).tolist() for index in (0, 1)] == [[12], []]
    assert wire.draft(progress_of({2: [22], 1: [12]}, limit=1)).tokens.tolist() == [23, 13]
    [again] = wire.service.requests[-2].starts
    assert (again.request, again.session, again.is_private) == ("r2", "s", True)
    assert again.committed == array([21]).tobytes()
    assert wire.core.counters.resyncs == 1


def restarted(numbers, size=100, **options) -> Wire:
    """Connected to a service that knows nothing of the sequences that run."""
    wire = connected(counting, **options)
    for number in numbers:
        start(wire.core, number, [number] * size)
    wire.settle()
    wire.cut()
    wire.service.sequences.clear()
    wire.connect()
    wire.settle()
    return wire


def test_lost_sequences_are_told_again_a_few_at_a_time(monkeypatch):
    """A lot goes out when the last one was answered, without any step in between."""
    monkeypatch.setattr("drafter_service.client.introductions.LOT_BYTES", 4 * 250)
    numbers = range(1, 9)
    wire = restarted(numbers)
    before = len(wire.service.requests)
    assert not len(wire.draft(progress_of({number: [number] for number in numbers}, limit=1)).tokens)
    lots = wire.service.requests[before:]
    assert [len(lot.starts) for lot in lots] == [2, 2, 2, 2]
    assert not any(lot.HasField("batch") for lot in lots)
    drafts = wire.draft(progress_of({number: [number] for number in numbers}, limit=1))
    assert len(drafts.tokens) == 8
    assert sorted(wire.service.texts()) == [[number] * 102 for number in numbers]


def test_those_that_are_known_have_drafts_while_others_are_told_again(monkeypatch):
    monkeypatch.setattr("drafter_service.client.introductions.LOT_BYTES", 4 * 250)
    numbers = range(1, 9)
    wire = restarted(numbers)
    for told in (0, 4, 6):
        turn = wire.core.draft(progress_of({number: [number] for number in numbers}, limit=1))
        wire.flush()
        assert [len(one.starts) for one in wire.upward] == ([2, 0] if told else [2])
        for _ in range(2 if told else 1):
            wire.serve(1)
            wire.deliver()
        # The next lot went out when the last one was answered, behind the batch.
        assert [len(one.starts) for one in wire.upward] == [2]
        assert len(wire.core.settle(turn).tokens) == told


def test_a_step_that_waits_behind_much_text_is_no_miss():
    """Else a service would be left alone for ever longer just when it is told again."""
    wire = connected(counting)
    start(wire.core, 1, [1])
    wire.settle()
    for number in range(2, 20):
        start(wire.core, number, [number] * 4000)
        assert not len(wire.draft(progress_of({1: [1]}, limit=1), in_time=False).tokens)
        wire.settle()
    assert wire.core.counters.timeouts == 18
    assert wire.draft(progress_of({1: [1]}, limit=1)).tokens.tolist() == [2]


def crowd(numbers, token, limit=1):
    return progress_of({number: [token] for number in numbers}, limit=limit)


@pytest.mark.parametrize("size", [100, 30])
def test_a_full_service_drafts_for_as_many_as_it_has_room_for(size):
    """And the others are not told of, step after step, only to drive those out."""
    wire = Wire(FakeService(counting, most_tokens=1000))
    wire.connect()
    wire.settle()
    fitting = 930 // size
    numbers = range(fitting + 5)
    for number in numbers:
        start(wire.core, number, [number] * size)
    for step in range(10):
        drafts = wire.draft(crowd(numbers, step))
        assert np.count_nonzero(np.diff(drafts.offsets)) >= 0.8 * fitting
    assert sum(len(request.starts) for request in wire.service.requests) <= fitting + 3
    assert sum(map(len, wire.service.texts())) <= 1000
    for number in numbers[: fitting - 1]:  # Where there is room again the others are told of.
        finish(wire.core, number, [])
    wire.settle()
    rest = numbers[fitting - 1 :]
    wire.draft(crowd(rest, 0))
    drafts = wire.draft(crowd(rest, 0))
    assert np.count_nonzero(np.diff(drafts.offsets)) == len(rest)
    wire.settle()
    assert len(wire.service.learned) == fitting - 1


def test_a_full_service_is_told_of_no_more_sequences_than_it_keeps():
    wire = Wire(FakeService(counting, most_sequences=3))
    wire.connect()
    wire.settle()
    for number in range(5):
        start(wire.core, number, [number])
    for step in range(5):
        drafts = wire.draft(crowd(range(5), step))
        assert np.diff(drafts.offsets).tolist() == [1, 1, 1, 0, 0]


def test_a_restarted_service_is_told_of_as_many_as_it_has_room_for():
    wire = Wire(FakeService(counting, most_tokens=1000))
    wire.service.most_tokens = 0
    wire.connect()
    wire.settle()
    for number in range(15):
        start(wire.core, number, [number] * 100)
    wire.settle()
    assert len(wire.service.texts()) == 15
    wire.cut()
    wire.service.sequences.clear()
    wire.service.most_tokens = 1000
    wire.connect()
    wire.settle()
    before = len(wire.service.requests)
    for step in range(5):
        wire.draft(crowd(range(15), step))
    assert sum(len(request.starts) for request in wire.service.requests[before:]) == 9
    assert wire.service.evicted == 0


def test_an_end_for_which_there_is_no_room_waits():
    wire = Wire(FakeService(counting, most_tokens=1000))
    for number in (1, 2):  # before anybody could be told
        start(wire.core, number, [number] * 400)
        finish(wire.core, number, [])
    start(wire.core, 3, [3] * 800)
    wire.connect()
    wire.serve()
    wire.service.sequences[wire.client_id] = {}
    wire.core.receive(wire.downward.popleft())
    wire.settle()
    assert len(wire.service.learned) == 2
    wire.draft(crowd([3], 3))
    wire.settle()
    assert len(wire.service.texts()) == 1
    wire.cut()
    start(wire.core, 4, [4] * 300)
    finish(wire.core, 4, [])
    wire.connect()
    wire.settle()
    assert len(wire.service.learned) == 2
    finish(wire.core, 3, [])
    wire.settle()
    assert len(wire.service.learned) == 4
    assert wire.service.evicted == 0


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("limit", ["message", "room"])
def test_an_end_that_nobody_can_take_is_dropped(monkeypatch, is_known, limit):
    """It would break every stream that it is told on."""
    if limit == "message":
        monkeypatch.setattr("drafter_service.client.core.MOST_TEXT_BYTES", 4 * 100)
        monkeypatch.setattr("drafter_service.client.introductions.MOST_TEXT_BYTES", 4 * 100)
    wire = Wire(FakeService(counting, most_tokens=100 if limit == "room" else 0))
    if is_known:
        wire.connect()
        wire.settle()
    start(wire.core, 1, [1] * 60)
    if is_known:
        wire.settle()
    finish(wire.core, 1, [2] * (101 if limit == "message" else 60))
    if not is_known:
        wire.connect()
    wire.settle()
    start(wire.core, 2, [3] * 10)
    finish(wire.core, 2, [4])
    wire.settle()
    is_learned = is_known and limit == "room"  # Only its end is told, which fits.
    assert len(wire.service.learned) == 1 + is_learned
    assert wire.core.counters.unlearned == (not is_learned)
    assert wire.service.texts() == []
    assert not wire.core.dialogue.is_owed


def test_a_sequence_too_long_for_any_message_has_no_drafts(monkeypatch):
    monkeypatch.setattr("drafter_service.client.introductions.MOST_TEXT_BYTES", 4 * 10)
    wire = connected(counting)
    start(wire.core, 1, [1] * 11)
    start(wire.core, 2, [1] * 10)
    drafts = wire.draft(progress_of({1: [], 2: []}, limit=1))
    assert [drafts.tokens_of(index).tolist() for index in (0, 1)] == [[], [2]]


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_was_handed_out_before_is_not_counted_afterwards(is_lost):
    wire = connected(counting)
    start(wire.core, 1, [5])
    assert len(wire.draft(progress_of({1: []}, limit=2)).tokens) == 2
    if is_lost:
        wire.service.lose(1)
        start(wire.core, 2, [9])
        wire.draft(progress_of({2: []}, limit=1))
        wire.draft(progress_of({1: [6]}, limit=2, verified=2, accepted=1))
        wire.draft(progress_of({1: [7]}, limit=2))
    else:
        wire.cut()
        wire.connect()
        wire.settle()
        assert len(wire.draft(progress_of({1: [6]}, limit=2, verified=2, accepted=1)).tokens) == 2
    assert (wire.service.drafted, wire.service.accepted) == (0, 0)


def test_a_service_that_has_more_than_there_is_has_something_else():
    wire = connected(counting)
    start(wire.core, 1, [5])
    start(wire.core, 2, [7])
    wire.settle()
    finish(wire.core, 2, [8])
    wire.cut()
    for known in wire.service.sequences[wire.client_id].values():
        known.text += [1, 2, 3]
    wire.connect()
    wire.settle()
    wire.draft(progress_of({1: [6]}, limit=1))
    assert wire.service.texts() == [[5, 6]]
    assert list(wire.service.learned.values()) == [[7, 8]]
