"""The client without a connection: how it tells of ends, once and in their order."""

from tests.drafter_service.core_wire import Wire, connected, counting, finish, start
from tests.drafter_service.fake_server import FakeService
from tests.replay import progress_of


def test_an_end_of_what_the_service_has_lost_is_told_with_its_beginning():
    wire = connected(counting)
    for number in (1, 2, 3):
        start(wire.core, number, [10 * number], learn=number != 3)
        wire.draft(progress_of({number: [10 * number + 1]}, limit=1))
        wire.service.lose(number)
        finish(wire.core, number, [10 * number + 2], learn=number != 2)
    wire.settle()
    assert list(wire.service.learned.values()) == [[10, 11, 12]]
    assert wire.service.texts() == []
    assert sum(len(request.starts) for request in wire.service.requests) == 4  # what is not learned is let be


def test_the_end_of_what_is_private_says_so():
    wire = connected()
    start(wire.core, 1, [5], learn=False)
    finish(wire.core, 1, [6], learn=True)
    wire.settle()
    [end] = wire.service.requests[-1].finishes
    assert not end.learn


def test_what_the_service_has_and_the_client_has_not_is_ended():
    wire = connected(counting)
    start(wire.core, 1, [5])
    wire.settle()
    wire.cut()
    wire.service.sequences[wire.client_id][77] = wire.service.sequences[wire.client_id][1]
    wire.connect()
    wire.settle()
    assert wire.service.texts() == [[5]]
    assert wire.service.learned == {}


def test_an_end_that_did_not_arrive_is_told_again_and_learned_once():
    for is_answered, is_forgotten in ((False, False), (True, False), (False, True), (True, True)):
        wire = connected(counting)
        start(wire.core, 1, [5])
        wire.settle()
        finish(wire.core, 1, [6, 7])
        wire.flush()
        if is_answered:
            wire.serve()  # but the answer is lost
        wire.cut()
        if is_forgotten:
            wire.service.sequences.clear()
        wire.connect()
        wire.settle()
        assert list(wire.service.learned.values()) == [[5, 6, 7]]
        assert wire.service.texts() == []


def test_ends_are_told_again_in_their_order_if_they_are_to_be_learned():
    wire = connected(counting)
    for number in range(1, 5):
        start(wire.core, number, [number])
        finish(wire.core, number, [10], learn=number != 4)
    wire.flush()
    wire.cut()
    wire.service.sequences.clear()
    wire.connect()
    wire.settle()
    assert list(wire.service.learned.values()) == [[1, 10], [2, 10], [3, 10]]
    assert sum(len(request.starts) for request in wire.service.requests) == 3


def test_only_so_much_that_has_ended_waits_for_a_service(monkeypatch):
    monkeypatch.setattr("drafter_service.client.ended.EndedSequences.__init__.__defaults__", (4 * 300,))
    wire = Wire(FakeService())
    for number in range(5):
        start(wire.core, number, [number] * 90)
        finish(wire.core, number, [number] * 10)
    start(wire.core, 9, [9])
    finish(wire.core, 9, [9], learn=False)
    wire.connect()
    wire.settle()
    assert sorted(wire.service.learned.values()) == [[number] * 100 for number in (2, 3, 4)]
    assert wire.core.counters.unlearned == 2


def test_much_that_has_ended_is_told_a_lot_at_a_time(monkeypatch):
    monkeypatch.setattr("drafter_service.client.core.LOT_BYTES", 4 * 250)
    wire = Wire(FakeService())
    for number in range(6):
        start(wire.core, number, [number] * (90 if number else 900))
        finish(wire.core, number, [number] * 10)
    wire.connect()
    wire.serve()
    wire.deliver()
    for finishes in (1, 2, 2, 1):
        [request] = wire.upward
        assert len(request.finishes) == finishes
        wire.serve()
        wire.deliver()
    assert not wire.upward


def test_goodbye_ends_what_runs_and_tells_what_has_ended():
    wire = connected()
    start(wire.core, 1, [5])
    start(wire.core, 2, [6])
    finish(wire.core, 2, [7])
    wire.core.say_goodbye()
    wire.settle()
    assert wire.service.texts() == []
    assert list(wire.service.learned.values()) == [[6, 7]]
    assert wire.service.counters is not None
