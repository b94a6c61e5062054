"""The client without a connection, against a service that is obvious."""

from collections import deque

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from drafter_service.client.core import Core
from drafter_service.client.messages import RefusedError
from drafter_service.client.running import Running
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.wire import WireError, drafts_message
from ssd.draft import DraftBatch, Path
from tests.drafter_service.fake_engine import FakeEngine, Request
from tests.drafter_service.fake_server import FakeService
from tests.replay import progress_of
from tests.strategies import array, examples


class Wire:
    """Between a core and a service: messages arrive when a test says so, or never."""

    def __init__(self, service: FakeService, ahead: int = 0, model: pb.Model | None = None) -> None:
        self.now = 0.0
        ids = iter(range(1, 1000))
        self.core = Core(
            pb.Hello(model=model),
            ahead=ahead,
            clock=lambda: self.now,
            random_bytes=lambda size: next(ids).to_bytes(size, "big"),
        )
        self.service = service
        self.client_id = b""
        self.upward: deque[pb.DraftRequest] = deque()
        self.downward: deque[pb.DraftResponse] = deque()

    def connect(self) -> None:
        self.core.greet()
        self.flush()
        self.client_id = self.upward[0].hello.client_id

    def flush(self) -> None:
        self.upward += [
            pb.DraftRequest.FromString(one.message().SerializeToString()) for one in self.core.dialogue.outgoing()
        ]

    def serve(self, most: int = 1 << 30) -> int:
        """Let the service answer some messages; returns how many."""
        count = 0
        while self.upward and count < most:
            self.downward.append(self.service.answer(self.client_id, self.upward.popleft()))
            count += 1
        return count

    def deliver(self, most: int = 1 << 30) -> None:
        """Let some answers arrive."""
        count = 0
        while self.downward and count < most:
            self.core.receive(self.downward.popleft())
            self.flush()
            count += 1

    def settle(self) -> None:
        """Let everything arrive."""
        self.flush()
        while self.serve():
            self.deliver()
        self.deliver()

    def cut(self) -> None:
        """What is on its way is lost."""
        self.upward.clear()
        self.downward.clear()
        self.core.hang_up()

    def draft(self, progress, *, in_time: bool = True) -> DraftBatch:
        turn = self.core.draft(progress)
        self.flush()
        if in_time:
            self.settle()
        return self.core.settle(turn)


def connected(guess=lambda _text, _limit: [], **options) -> Wire:
    wire = Wire(FakeService(guess), **options)
    wire.connect()
    wire.settle()
    return wire


def start(core: Core, sequence_id: int, prompt: list[int], **options) -> None:
    core.start(sequence_id, array(prompt), **{"session": None, "request": None, "learn": True, **options})


def counting(text: list[int], limit: int) -> list[int]:
    """The guess that numbers go up."""
    return list(range(text[-1] + 1, text[-1] + 1 + limit))


def finish(core: Core, sequence_id: int, tokens: list[int], **outcome) -> None:
    core.finish(sequence_id, array(tokens), **{"verified": 0, "accepted": 0, "learn": True, **outcome})


# All that was told, in any order of events.


class Telling(RuleBasedStateMachine):
    """Whatever happens, the service hears of every token exactly once, and learns every text that it may, once."""

    def __init__(self) -> None:
        super().__init__()
        self.service = FakeService(self.guess)
        self.wire = None
        self.engine = FakeEngine()
        self.texts = {}
        """By the prompt's first token, which no two sequences share."""
        self.to_learn = {}
        self.private = set()

    @initialize(ahead=st.sampled_from([0, 5, 9]))
    def begin(self, ahead):
        self.wire = Wire(self.service, ahead)
        self.core = self.wire.core

    def guess(self, text, limit):
        """What will follow, but for every seventh token."""
        return [
            token + (place % 7 == 0)
            for place, token in enumerate(self.texts[text[0]][len(text) : len(text) + limit], len(text))
        ]

    @rule(prompt=st.integers(1, 6), output=st.integers(0, 60), learn=st.booleans())
    def start(self, prompt, output, learn):
        number = len(self.texts)
        text = [1000 + number, *range(10 * number, 10 * number + prompt + output)]
        self.texts[text[0]] = text
        self.engine.running[number] = Request(text, 1 + prompt)
        start(self.core, number, text[: 1 + prompt], learn=learn)
        if not learn:
            self.private.add(number)
        self.wire.flush()

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), in_time=st.booleans(), least=st.integers(0, 3))
    def draft(self, data, in_time, least):
        running = st.sampled_from(sorted(self.engine.running))
        chosen = data.draw(st.lists(running, min_size=1, max_size=4, unique=True))
        limits = [self.engine.limit(number, data.draw(st.integers(0, 4))) for number in chosen]
        turn = self.core.draft(self.engine.progress(chosen, limits))
        self.wire.flush()
        if in_time:
            self.wire.settle()
        else:
            self.wire.serve(least)
            self.wire.deliver(least)
        drafts = self.core.settle(turn)
        assert np.all(np.diff(drafts.offsets) <= limits)
        self.engine.verify(chosen, drafts, [data.draw(st.integers(0, 4)) for _ in chosen])

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), learn=st.booleans())
    def finish(self, data, learn):
        number = data.draw(st.sampled_from(sorted(self.engine.running)))
        text = self.engine.finish(self.core, number, learn)
        if learn and number not in self.private:
            self.to_learn[number] = text
        self.wire.flush()

    @rule(served=st.integers(0, 5), delivered=st.integers(0, 5))
    def pass_on(self, served, delivered):
        self.wire.serve(served)
        self.wire.deliver(delivered)

    @rule(served=st.integers(0, 5), is_forgotten=st.booleans())
    def cut(self, served, is_forgotten):
        self.wire.serve(served)
        self.wire.cut()
        if is_forgotten:
            self.service.sequences.clear()

    @precondition(lambda self: not self.wire.client_id or not self.wire.core.dialogue.silent_s)
    @rule()
    def connect(self):
        if self.core.dialogue.phase.name == "OFFLINE":
            self.wire.connect()

    @rule(data=st.data())
    def lose(self, data):
        known = [wire_id for one in self.service.sequences.values() for wire_id in one]
        if known:
            self.service.lose(data.draw(st.sampled_from(sorted(known))))

    def teardown(self):
        if self.wire is None:
            return
        if self.core.dialogue.phase.name == "OFFLINE":
            self.wire.connect()
        self.wire.settle()
        for _ in range(3):  # The first answer may tell of what was lost.
            self.ask_for_all()
        running = [request.text[: request.done] for request in self.engine.running.values()]
        assert sorted(self.service.texts()) == sorted(running)
        assert sorted(self.service.learned.values()) == sorted(self.to_learn.values())
        assert self.service.drafted <= self.engine.drafted
        assert self.service.accepted <= self.engine.accepted
        assert self.service.steps <= self.engine.steps

    def ask_for_all(self):
        running = sorted(self.engine.running)
        asked = len(self.service.requests)
        while running and len(self.service.requests) == asked:  # After some that were late it asks more rarely.
            self.wire.draft(self.engine.progress(running, [100] * len(running)))
            for request in self.engine.running.values():
                request.committed = request.verified = request.accepted = 0


TestTelling = Telling.TestCase
TestTelling.settings = examples(80)


# Draft-ahead.


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
    tree = DraftBatch.of_paths([Path(array(tokens), np.full(len(tokens), 0.5)) for tokens in ([6, 7], range(21, 35))])
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


# What services may send.


def answer_of(*drafts: tuple[list[int], list[int]], odds: float = 0.5) -> DraftBatch:
    """Drafts of (tokens, parents) each."""
    batch = DraftBatch.of_paths([Path(array(tokens), np.full(len(tokens), odds, np.float32)) for tokens, _ in drafts])
    batch.parents[:] = [parent for _, parents in drafts for parent in parents]
    return batch


PATH_3 = [-1, 0, 1]
USELESS = {
    "longer than asked for": answer_of(([1, 2, 3], PATH_3), (list(range(9)), list(range(-1, 8)))),
    "a tree that is longer than the limit": answer_of(([1, 2, 3], PATH_3), ([1, 2, 3, 4], [-1, 0, 0, 0])),
    "outside the vocabulary": answer_of(([1, 2, 3], PATH_3), ([1, 100], [-1, 0])),
    "a parent that comes later": answer_of(([1, 2, 3], PATH_3), ([1, 2], [1, 0])),
    "a parent of its own": answer_of(([1, 2, 3], PATH_3), ([1, 2], [-1, 1])),
    "a parent before the first": answer_of(([1, 2, 3], PATH_3), ([1, 2], [-2, 0])),
}


@pytest.mark.parametrize("drafts", USELESS.values(), ids=USELESS.keys())
def test_a_draft_that_is_none_is_dropped_and_the_others_are_used(drafts):
    wire = connected(ahead=2, model=pb.Model(vocabulary_size=100))
    start(wire.core, 1, [5])
    start(wire.core, 2, [6])
    wire.settle()
    turn = wire.core.draft(progress_of({1: [], 2: []}, limit=3))
    wire.flush()
    wire.serve()
    wire.downward[0].drafts.CopyFrom(drafts_message(drafts))
    wire.deliver()
    got = wire.core.settle(turn)
    assert [got.tokens_of(index).tolist() for index in (0, 1)] == [[1, 2, 3], []]
    assert wire.core.counters.malformed == 1
    # The service takes the counts that follow.
    wire.service.sequences[wire.client_id][1].drafted = [1, 2, 3]
    wire.draft(progress_of({1: [1, 9], 2: [7]}, limit=3, verified=0))
    assert sorted(wire.service.texts()) == [[5, 1, 9], [6, 7]]


@pytest.mark.parametrize("odds", [float("nan"), -0.1, 1.1])
def test_odds_that_are_none_spoil_a_draft(odds):
    wire = connected()
    start(wire.core, 1, [5])
    wire.settle()
    turn = wire.core.draft(progress_of({1: []}, limit=3))
    wire.flush()
    wire.serve()
    wire.downward[0].drafts.CopyFrom(drafts_message(answer_of(([1], [-1]), odds=odds)))
    wire.deliver()
    assert not len(wire.core.settle(turn).tokens)
    assert wire.core.counters.malformed == 1


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("offsets", b"123"),
        ("offsets", array([0, 2]).tobytes()),
        ("offsets", array([1, 2, 2]).tobytes()),
        ("offsets", array([0, 1, 1]).tobytes()),
        ("offsets", array([0, 3, 2]).tobytes()),
        ("tokens", array([0xFFFF_FFFF, 1]).tobytes()),
        ("tokens", b"123"),
        ("parents", array([0]).tobytes()),
        ("odds", bytes(9)),
        ("source", bytes(3)),
    ],
)
def test_an_answer_whose_arrays_do_not_fit_is_no_answer(field, data):
    wire = connected(lambda _text, _limit: [1])
    start(wire.core, 1, [5])
    start(wire.core, 2, [5])
    wire.settle()
    turn = wire.core.draft(progress_of({1: [], 2: []}, limit=3))
    wire.flush()
    wire.serve()
    setattr(wire.downward[0].drafts, field, data)
    wire.deliver()
    assert not len(wire.core.settle(turn).tokens)
    assert wire.core.counters.malformed == 2
    wire.draft(progress_of({1: [1], 2: [1]}, limit=3))
    assert wire.service.texts() == [[5, 1], [5, 1]]


def test_tokens_that_belong_to_nobody_make_an_answer_none():
    wire = connected(lambda _text, _limit: [1, 2])
    start(wire.core, 1, [5])
    wire.settle()
    turn = wire.core.draft(progress_of({1: []}, limit=3))
    wire.flush()
    wire.serve()
    wire.downward[0].drafts.offsets = array([0, 1]).tobytes()
    wire.deliver()
    assert not len(wire.core.settle(turn).tokens)
    assert wire.core.counters.malformed == 1


def response_after(wire: Wire, **changes) -> pb.DraftResponse:
    start(wire.core, 1, [5])
    wire.flush()
    wire.serve()
    response = wire.downward.pop()
    for name, value in changes.items():
        if name == "error":
            response.error.CopyFrom(value)
        else:
            setattr(response, name, value)
    return response


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 99}, "answered step 99 out of order"),
        ({"error": pb.Error(code=3, message="no sense")}, "no sense"),
        ({"lost_ids": b"123"}, "lost_ids has 3 bytes"),
    ],
)
def test_a_service_that_breaks_the_contract_meets_a_new_client(changes, reason):
    wire = connected()
    response = response_after(wire, **changes)
    with pytest.raises(WireError, match=reason):
        wire.core.receive(response)
    before = wire.client_id
    wire.core.hang_up(is_doubtful=True)
    wire.connect()
    assert wire.client_id != before
    wire.settle()
    wire.draft(progress_of({1: []}, limit=1))
    assert [known.text for known in wire.service.sequences[wire.client_id].values()] == [[5]]


def test_a_second_answer_to_a_message_breaks_the_contract():
    wire = connected()
    response = response_after(wire)
    wire.core.receive(response)
    with pytest.raises(WireError, match="out of order"):
        wire.core.receive(response)


@pytest.mark.parametrize(
    ("response", "error", "reason"),
    [
        (pb.DraftResponse(step=1), RefusedError, "protocol 2"),
        (pb.DraftResponse(step=1, welcome=pb.Welcome(protocol=3)), RefusedError, "protocol 2"),
        (pb.DraftResponse(step=1, error=pb.Error(code=3, message="who?")), RefusedError, r"who\?"),
        (pb.DraftResponse(step=1, error=pb.Error(code=8, message="full")), WireError, "full"),
        (
            pb.DraftResponse(step=1, welcome=pb.Welcome(protocol=2, resumed_ids=bytes(8))),
            WireError,
            "resumed_lengths has 0 elements, not 1",
        ),
    ],
)
def test_what_is_no_welcome(response, error, reason):
    wire = Wire(FakeService())
    wire.connect()
    with pytest.raises(error, match=reason):
        wire.core.receive(response)


# Loss and resumption.


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
        start(wire.core, number, [10 * number], session="s", request=f"r{number}", learn=number == 1)
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


# Lateness.


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
    wire = connected(counting, ahead=9)
    start(wire.core, 1, [5])
    wire.draft(progress_of({1: []}, limit=8), in_time=False)
    wire.settle()
    for _ in range(62):
        wire.draft(progress_of({1: [5]}, limit=8))
    assert wire.service.counters is None
    wire.draft(progress_of({1: [5]}, limit=8))
    assert (wire.service.counters.timeouts, wire.service.counters.dropped) == (1, 1)


# What engines may ask.


def test_names_that_are_too_long_are_refused():
    wire = connected()
    for name in ("session", "request"):
        with pytest.raises(ValueError, match=f"the name of a {name} has at most 512 bytes"):
            start(wire.core, 1, [5], **{name: "ä" * 257})
    start(wire.core, 1, [5], session="ä" * 256)


def test_a_prompt_that_changes_afterwards_is_told_as_it_was():
    wire = Wire(FakeService())
    prompt = array([5, 6])
    wire.core.start(1, prompt, session=None, request=None, learn=True)
    prompt[:] = 9
    wire.connect()
    wire.settle()
    wire.draft(progress_of({1: []}, limit=1))
    assert wire.service.texts() == [[5, 6]]


def test_ids_may_be_used_again():
    wire = connected(counting)
    for prompt in (5, 15):
        start(wire.core, 1, [prompt])
        with pytest.raises(ValueError, match="was offered 0 tokens"):
            wire.core.draft(progress_of({1: []}, limit=1, verified=1))
        assert wire.draft(progress_of({1: [prompt + 1]}, limit=1)).tokens.tolist() == [prompt + 2]
        finish(wire.core, 1, [])
        with pytest.raises(ValueError, match="sequence 1 was not started"):
            wire.core.draft(progress_of({1: []}, limit=1))
    wire.settle()
    assert sorted(wire.service.learned.values()) == [[5, 6], [15, 16]]
    assert wire.service.texts() == []


def test_batches_that_cannot_be_are_refused_without_effect():
    wire = connected(counting)
    start(wire.core, 1, [5])
    start(wire.core, 2, [6])
    wire.draft(progress_of({1: [], 2: []}, limit=2))
    before = len(wire.service.requests)
    twice = progress_of({1: [], 2: []}, limit=1)
    twice.sequence_ids[1] = 1
    for wrong, reason in (
        (twice, "twice"),
        (progress_of({1: [], 3: []}, limit=1), "sequence 3 was not started"),
        (progress_of({1: []}, limit=1, verified=3), "it cannot have verified 3"),
        (progress_of({1: []}, limit=1, verified=1, accepted=2), "verified 1 and accepted 2"),
        (progress_of({1: [0xFFFF_FFFF]}, limit=1), "4,294,967,294"),
        (progress_of({1: []}, limit=1, cost=0.0), "above 0 to 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            wire.core.draft(wrong)
    for wrong in ({"verified": 3}, {"verified": 1, "accepted": 2}):
        with pytest.raises(ValueError, match="was offered 2 tokens"):
            finish(wire.core, 1, [], **wrong)
    with pytest.raises(ValueError, match="sequence 3 was not started"):
        finish(wire.core, 3, [])
    with pytest.raises(ValueError, match="sequence 1 was started before"):
        start(wire.core, 1, [5])
    wire.settle()
    assert len(wire.service.requests) == before
    assert wire.draft(progress_of({1: [6], 2: [7]}, limit=1, verified=1, accepted=1)).tokens.tolist() == [7, 8]
