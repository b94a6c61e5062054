"""The client without a connection, against a service that is obvious: all that was told, in any order of events, and
what engines may ask."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.drafter_service.core_wire import Wire, connected, counting, finish, start
from tests.drafter_service.fake_engine import FakeEngine, Request
from tests.drafter_service.fake_server import FakeService
from tests.replay import progress_of
from tests.strategies import array, examples


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

    @initialize()
    def begin(self):
        self.wire = Wire(self.service)
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


def test_names_that_are_too_long_are_refused():
    wire = connected()
    for name in ("session_id", "request_id"):
        with pytest.raises(ValueError, match=f"{name} has at most 512 bytes"):
            start(wire.core, 1, [5], **{name: "ä" * 257})
    start(wire.core, 1, [5], session_id="ä" * 256)


def test_a_prompt_that_changes_afterwards_is_told_as_it_was():
    wire = Wire(FakeService())
    prompt = array([5, 6])
    wire.core.start(1, prompt, session_id=None, request_id=None, learn=True)
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
