"""The client without a connection: drafts that were asked for ahead."""

import numpy as np
import pytest

from drafter_service.client.running import Running
from drafter_service.transport.wire import drafts_message
from ssd.types import DraftBatch, Path
from tests.drafter_service.core_wire import Wire, connected, counting, start
from tests.drafter_service.fake_engine import FakeEngine, Request
from tests.drafter_service.fake_server import FakeService
from tests.replay import progress_of
from tests.strategies import array


def run_requests(ahead: int, *, limit: int, seed: int, most_draft: int = 64):
    """A batch of requests to their ends, verified by a target that a guess is mostly right about.

    Returns the engine, the service, the drafts of each sequence by how many tokens it had, and the client's counters.
    """
    rng = np.random.default_rng(seed)
    texts = {1000 + number: [1000 + number, *rng.integers(0, 50, 200).tolist()] for number in range(4)}
    wrong = {first: set(rng.integers(0, 200, 8).tolist()) for first in texts}

    def guess(text, limit):
        own = texts[text[0]]
        return [own[at] + (at in wrong[text[0]]) for at in range(len(text), min(len(own), len(text) + limit))]

    wire = connected(guess, ahead=ahead)
    wire.service.most_draft = most_draft
    engine = FakeEngine()
    drafted = {}
    for number, text in enumerate(texts.values()):
        engine.running[number] = Request(text, 1 + number)
        start(wire.core, number, text[: 1 + number])
    while engine.running:
        chosen = sorted(engine.running)
        drafts = wire.draft(engine.progress(chosen, [engine.limit(number, limit) for number in chosen]))
        for index, number in enumerate(chosen):
            drafted[number, engine.running[number].done] = drafts.tokens_of(index).tolist()
        engine.verify(chosen, drafts)
        for number in chosen:
            if engine.running[number].done == len(engine.running[number].text):
                engine.finish(wire.core, number)
    wire.settle()
    assert sorted(wire.service.learned.values()) == sorted(texts.values())
    return engine, wire.service, drafted, wire.core.counters


@pytest.mark.parametrize("seed", range(3))
def test_drafts_ahead_are_the_drafts_that_would_have_come(seed):
    plain, plain_service, plain_drafts, _ = run_requests(0, limit=4, seed=seed)
    ahead, ahead_service, ahead_drafts, counters = run_requests(15, limit=4, seed=seed)
    assert ahead_drafts == plain_drafts
    assert ahead.steps == plain.steps
    assert counters.ahead > 20
    asked = [
        sum(len(request.batch.sequence_ids) // 8 for request in one.requests) for one in (plain_service, ahead_service)
    ]
    assert counters.ahead <= asked[0] - asked[1] <= counters.ahead + 4  # none is needed for the last token


@pytest.mark.parametrize(("ahead", "limit"), [(0, 4), (5, 4), (17, 4), (17, 16), (40, 7)])
def test_only_verified_tokens_count(ahead, limit):
    engine, service, _, counters = run_requests(ahead, limit=limit, seed=7)
    assert (service.drafted, service.accepted, service.steps) == (engine.drafted, engine.accepted, engine.steps)
    assert (counters.ahead > 0) == (ahead > 0)


@pytest.mark.parametrize("ahead", [0, 17])
def test_the_usual_case_is_no_special_case(ahead, monkeypatch):
    """What is told of a batch without loose ends is what would be told the long way round."""
    _, quick, quick_drafts, _ = run_requests(ahead, limit=4, seed=5)
    plain = Running.is_plain
    taken = []
    monkeypatch.setattr(Running, "is_plain", lambda running, rows: taken.append(plain(running, rows)) and False)
    _, long, long_drafts, _ = run_requests(ahead, limit=4, seed=5)
    assert sum(taken) > (0 if ahead else 10)
    assert quick_drafts == long_drafts
    assert [request.SerializeToString() for request in quick.requests] == [
        request.SerializeToString() for request in long.requests
    ]


def test_no_more_is_asked_for_than_could_serve_a_step():
    """A service that drafts 16 at most has no second draft of 8 behind a first one and the target's own token."""
    for most_draft, expected in ((16, 0), (17, 9), (0, 9)):
        wire = Wire(FakeService(most_draft=most_draft), ahead=9)
        wire.connect()
        wire.settle()
        start(wire.core, 1, [5])
        wire.draft(progress_of({1: []}, limit=8))
        assert wire.service.requests[-1].batch.ahead == expected


def test_a_batch_that_has_all_at_hand_asks_nobody():
    wire = connected(counting, ahead=9)
    start(wire.core, 1, [5])
    assert wire.draft(progress_of({1: []}, limit=4)).tokens.tolist() == [6, 7, 8, 9]
    asked = len(wire.service.requests)
    turn = wire.core.draft(progress_of({1: [6, 7, 8, 9, 10]}, limit=4, verified=4, accepted=4))
    assert wire.core.is_settled(turn)
    drafts = wire.core.settle(turn)
    assert drafts.tokens.tolist() == [11, 12, 13, 14]
    assert drafts.parents.tolist() == [-1, 0, 1, 2]
    wire.settle()
    assert len(wire.service.requests) == asked


@pytest.mark.parametrize("committed", [[6, 7, 8, 9, 11], [6, 7, 9], [7], [6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]])
def test_what_the_target_did_not_follow_is_void(committed):
    wire = connected(counting, ahead=9)
    start(wire.core, 1, [5])
    wire.draft(progress_of({1: []}, limit=4))
    drafts = wire.draft(progress_of({1: committed}, limit=4))
    assert drafts.tokens.tolist() == counting(committed, 4)
    assert wire.service.texts() == [[5, *committed]]


@pytest.mark.parametrize(
    ("costs", "is_asked"),
    [
        ((None, None), False),
        ((0.1, 0.1), False),
        ((0.1, 0.05), False),
        ((0.1, 0.2), True),
        ((None, 0.1), True),
        ((0.1, None), True),
    ],
)
def test_what_may_not_pay_any_more_is_asked_for_again(costs, is_asked):
    wire = connected(counting, ahead=9)
    start(wire.core, 1, [5])
    wire.draft(progress_of({1: []}, limit=4, cost=costs[0]))
    turn = wire.core.draft(progress_of({1: [6, 7, 8, 9, 10]}, limit=4, verified=4, accepted=4, cost=costs[1]))
    assert wire.core.is_settled(turn) is not is_asked


def test_trees_are_handed_out_whole_and_once():
    tree = DraftBatch(
        array([6, 7, 8]),
        np.array([-1, -1, 0], np.int32),
        np.full(3, 0.5, np.float32),
        np.zeros(3, np.uint8),
        array([0, 3]),
    )
    wire = connected(counting, ahead=9)
    start(wire.core, 1, [5])
    wire.settle()
    for committed in ([], [6, 8]):
        turn = wire.core.draft(progress_of({1: committed}, limit=3))
        assert not wire.core.is_settled(turn)
        wire.flush()
        wire.serve()
        wire.downward[0].drafts.CopyFrom(drafts_message(tree))
        wire.deliver()
        drafts = wire.core.settle(turn)
        assert (drafts.tokens.tolist(), drafts.parents.tolist()) == ([6, 7, 8], [-1, -1, 0])


def test_what_nobody_can_use_is_not_kept_back():
    wire = connected(counting, ahead=9)
    wire.service.most_draft = 1
    start(wire.core, 1, [5])
    wire.draft(progress_of({1: []}, limit=0))
    wire.draft(progress_of({1: [6]}, limit=0))
    assert wire.service.texts() == [[5, 6]]


def test_a_tree_beside_a_path_that_lasts_is_asked_for_again():
    tree = DraftBatch.from_paths([Path(array(tokens), np.full(len(tokens), 0.5)) for tokens in ([6, 7], range(21, 35))])
    tree.parents[:2] = -1
    wire = connected(counting, ahead=9)
    start(wire.core, 1, [5])
    start(wire.core, 2, [20])
    wire.settle()
    turn = wire.core.draft(progress_of({1: [], 2: []}, limit=5))
    wire.flush()
    wire.serve()
    wire.downward[0].drafts.CopyFrom(drafts_message(tree))
    wire.deliver()
    drafts = wire.core.settle(turn)
    assert [drafts.tokens_of(index).tolist() for index in (0, 1)] == [[6, 7], [21, 22, 23, 24, 25]]
    assert drafts.parents[:2].tolist() == [-1, -1]
    progress = progress_of({1: [], 2: list(range(21, 27))}, limit=5)
    progress.max_draft[0] = 2
    drafts = wire.draft(progress)
    assert len(wire.service.requests[-1].batch.sequence_ids) == 8  # the first alone
    assert [drafts.tokens_of(index).tolist() for index in (0, 1)] == [[6, 7], [27, 28, 29, 30, 31]]
    assert drafts.parents[:2].tolist() == [-1, 0]


def test_what_is_left_is_better_than_nothing_while_the_service_is_behind():
    """And all that was verified of a draft is counted, whatever comes between."""
    wire = connected(counting, ahead=9)
    start(wire.core, 1, [5])
    start(wire.core, 2, [20])
    wire.draft(progress_of({1: []}, limit=4))
    assert not len(wire.draft(progress_of({2: []}, limit=4), in_time=False).tokens)
    committed = [6, 7, 8, 9, 10]
    for left in ([11, 12, 13, 14], [16, 17, 18]):
        drafts = wire.draft(progress_of({1: committed}, limit=4, verified=4, accepted=4), in_time=False)
        assert drafts.tokens.tolist() == left
        committed = [left[-1] - 3 + n for n in range(5)]
    drafts = wire.draft(progress_of({1: [16, 0]}, limit=4, verified=3, accepted=1), in_time=False)
    assert not len(drafts.tokens)
    wire.draft(progress_of({1: [1]}, limit=4), in_time=False)
    wire.settle()
    assert wire.draft(progress_of({1: [2]}, limit=4)).tokens.tolist() == [3, 4, 5, 6]
    assert wire.service.texts()[0] == [5, *range(6, 17), 0, 1, 2]
    assert (wire.service.drafted, wire.service.accepted, wire.service.steps) == (11, 9, 5)


def test_what_is_left_is_void_once_the_service_was_asked():
    wire = connected(counting, ahead=9)
    start(wire.core, 1, [5])
    wire.draft(progress_of({1: []}, limit=8))
    short = progress_of({1: list(range(6, 15))}, limit=9, verified=8, accepted=8)
    assert not len(wire.draft(short, in_time=False).tokens)
    wire.settle()
    assert wire.draft(progress_of({1: [0]}, limit=8)).tokens.tolist() == list(range(1, 9))
    assert (wire.service.drafted, wire.service.accepted) == (8, 8)
