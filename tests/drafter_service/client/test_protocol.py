"""The client's protocol against a simple reference service: everything is sent once, in any order of events."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from drafter_service.client import sequences
from drafter_service.client.pending import MAX_BACKOFF_DOUBLINGS, Phase
from drafter_service.client.protocol import NamespaceState, Protocol
from drafter_service.client.sequences import GROWTH
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import read_batch
from ssd.corpus.rollout import Rollout
from ssd.types import DraftBatch, Progress, StepTime, offsets_of
from tests.drafter_service.client_wire import Wire, connected, counting, finish, start
from tests.drafter_service.fake_server import FakeService, unpacked
from tests.replay import progress_of
from tests.strategies import array, examples

MOST_SKIPPED_STEPS = 2 << MAX_BACKOFF_DOUBLINGS
"""After late responses the client requests drafts less often, but at least once in half of these steps."""
PROMPTS = st.sampled_from([1, 1, 2, 3, 5, 6])
"""Lengths of prompts, short ones more often, so that limits of numbers are reached as well as limits of lengths."""


@dataclass
class Request:
    """A running request."""

    text: list[int]
    """Complete prompt and output."""
    done: int
    """Number of its tokens that are prompt or committed."""
    committed: int = 0
    """Number of tokens committed since the last draft."""
    verified: int = 0

    @property
    def unreported(self) -> list[int]:
        return self.text[self.done - self.committed : self.done]


@dataclass
class FakeEngine:
    """Runs requests and reports to a client."""

    running: dict[int, Request] = field(default_factory=dict)
    steps: int = 0
    drafted: int = 0

    def progress(self, sequence_ids: list[int], limits: list[int], cost: float | None = None) -> Progress:
        """Return the progress that the engine reports."""
        chosen = [self.running[sequence_id] for sequence_id in sequence_ids]
        verified = np.array([request.verified for request in chosen], np.uint32)
        return Progress(
            sequence_ids=np.array(sequence_ids, np.uint64),
            tokens=np.array([token for request in chosen for token in request.unreported], np.uint32),
            offsets=offsets_of(np.array([request.committed for request in chosen], np.int64)),
            verified=verified,
            max_draft=np.array(limits, np.uint32),
            cost=cost,
        )

    def limit(self, sequence_id: int, limit: int) -> int:
        """Return the number of draft tokens that a request can use: the target adds a bonus token."""
        request = self.running[sequence_id]
        return max(0, min(limit, len(request.text) - request.done - 1))

    def verify(self, sequence_ids: list[int], drafts: DraftBatch, verified: list[int] | None = None) -> None:
        """Verify drafts, or the first `verified` tokens of each, and commit the target's tokens."""
        for index, sequence_id in enumerate(sequence_ids):
            request = self.running[sequence_id]
            draft = drafts.tokens_of(index).tolist()
            if verified is not None:
                draft = draft[: verified[index]]
            own = request.text[request.done :]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == own[accepted]:
                accepted += 1
            request.verified = len(draft)
            request.committed = len(own[: accepted + 1])
            request.done += request.committed
            self.steps += request.committed > 0
            self.drafted += len(draft)

    def finish(self, client: Protocol, sequence_id: int, learn: bool = True) -> list[int]:
        """End a request; return its text."""
        request = self.running.pop(sequence_id)
        client.finish(
            sequence_id, np.array(request.unreported, np.uint32), verified=request.verified, steps=1, learn=learn
        )
        return request.text[: request.done]


class AnyOrder(RuleBasedStateMachine):
    """Check that in any order of events the service receives each token once, and learns each permitted text once."""

    limits: ClassVar = {}
    """Limits of the service."""
    scale, longest_output = 1, 60
    """Factor of the lengths of prompts, and the largest number of tokens of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.service = FakeService(self.guess, **self.limits)
        self.wire = None
        self.engine = FakeEngine()
        self.texts = {}
        """Texts by the prompt's first token, which no two sequences share."""
        self.to_learn = {}
        self.private = set()

    @initialize()
    def begin(self):
        self.wire = Wire(self.service)
        self.client = self.wire.client

    def guess(self, text, limit):
        """Draft the tokens that follow, with every seventh one wrong."""
        return [
            token + (place % 7 == 0)
            for place, token in enumerate(self.texts[text[0]][len(text) : len(text) + limit], len(text))
        ]

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), output=st.integers(0, 60), learn=st.booleans())
    def start(self, prompts, output, learn):
        for prompt in prompts:
            number, size = len(self.texts), 1 + self.scale * prompt
            text = [1000 + number, *range(10 * number, 10 * number + size + min(output, self.longest_output))]
            self.texts[text[0]] = text
            self.engine.running[number] = Request(text, size)
            start(self.client, number, text[:size], learn=learn)
            if not learn:
                self.private.add(number)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), in_time=st.booleans(), served=st.integers(0, 3))
    def draft(self, data, in_time, served):
        running = st.sampled_from(sorted(self.engine.running))
        chosen = data.draw(st.lists(running, min_size=1, max_size=4, unique=True))
        limits = [self.engine.limit(number, data.draw(st.integers(0, 4))) for number in chosen]
        turn = self.client.draft(self.engine.progress(chosen, limits))
        if in_time:
            self.wire.settle()
        else:
            self.wire.serve(served)
            self.wire.deliver(served)
        drafts = self.client.settle(turn)
        assert np.all(np.diff(drafts.offsets) <= limits)
        self.engine.verify(chosen, drafts, [data.draw(st.integers(0, 4)) for _ in chosen])

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), learn=st.booleans())
    def finish(self, data, learn):
        running = st.sampled_from(sorted(self.engine.running))
        for number in data.draw(st.lists(running, min_size=1, max_size=3, unique=True)):
            text = self.engine.finish(self.client, number, learn)
            if learn and number not in self.private:
                self.to_learn[number] = text

    @rule(served=st.integers(0, 5), delivered=st.integers(0, 5))
    def pass_on(self, served, delivered):
        self.wire.serve(served)
        self.wire.deliver(delivered)

    @rule(served=st.integers(0, 5))
    def cut(self, served):
        self.wire.serve(served)
        self.wire.cut()

    @precondition(lambda self: self.wire and self.client.pending.phase is Phase.OFFLINE)
    @rule()
    def connect(self):
        self.wire.connect()

    @rule(data=st.data())
    def drop(self, data):
        """Make the service drop a sequence."""
        if self.service.sequences:
            del self.service.sequences[data.draw(st.sampled_from(sorted(self.service.sequences)))]

    def teardown(self):
        if self.wire is None:
            return
        if self.client.pending.phase is Phase.OFFLINE:
            self.connect()
        self.wire.settle()
        for _ in range(3):  # The first response may report lost sequences.
            self.draft_for_all()
        self.check()
        assert self.service.drafted <= self.engine.drafted
        assert self.service.steps <= self.engine.steps

    def running(self):
        return sorted(request.text[: request.done] for request in self.engine.running.values())

    def check(self):
        assert sorted(self.service.texts()) == self.running()
        assert sorted(self.service.learned.values()) == sorted(self.to_learn.values())

    def draft_for_all(self):
        running = sorted(self.engine.running)
        before = len(self.service.requests)
        for _ in range(MOST_SKIPPED_STEPS):
            if not running or len(self.service.requests) > before:
                break
            self.wire.draft(self.engine.progress(running, [100] * len(running)))
            for request in self.engine.running.values():
                request.committed = request.verified = 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = examples(80)


class AnyOrderOfMany(AnyOrder):
    """Check the same with limits of service and client: those sequences are registered for which there is room."""

    limits: ClassVar = {"max_sequences": 3, "max_tokens": 1010}
    scale = 200
    longest_output = 15
    constants: ClassVar = {"PART_BYTES": 4 * 1200, "PART_SEQUENCES": 3, "MAX_TEXT_BYTES": 4 * 1100}

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in self.constants.items():
            self.patch.setattr(sequences, name, value)
        self.seen_limits = {self.service.max_tokens}
        """Values of `max_tokens` of the services so far."""

    def teardown(self):
        try:
            super().teardown()
        finally:
            self.patch.undo()

    @precondition(lambda self: self.wire and self.client.pending.phase is Phase.OFFLINE)
    @rule(max_tokens=st.sampled_from([1010, 1610]))
    def connect_to_another_service(self, max_tokens):
        self.service.max_tokens = max_tokens
        self.seen_limits.add(max_tokens)
        self.connect()

    def longest(self, max_tokens):
        """Return the number of tokens of the longest sequence that a service with this limit is sent."""
        return min(max_tokens - max_tokens // GROWTH, self.constants["MAX_TEXT_BYTES"] // 4)

    def check(self):
        largest = self.service.max_tokens - self.service.max_tokens // GROWTH
        most = self.longest(self.service.max_tokens)
        registered, waiting = self.service.texts(), self.running()
        for text in registered:
            waiting.remove(text)
        free = largest - sum(map(len, registered))
        assert not waiting or len(registered) == 3 or all(len(text) > min(free, most) for text in waiting)
        for number in [*self.engine.running]:
            self.engine.finish(self.client, number, learn=False)
        self.wire.settle()
        for text in self.service.learned.values():
            self.to_learn = {number: each for number, each in self.to_learn.items() if each != text}
        assert all(len(text) > self.longest(min(self.seen_limits)) for text in self.to_learn.values())
        # A service that has learned a text, but whose answer was lost, may be followed by one for which it is too long.
        uncertain = self.client.counters.unlearned - len(self.to_learn)
        assert uncertain == 0 or (uncertain > 0 and len(self.seen_limits) > 1)
        assert self.service.evicted == 0
        for request in self.service.requests:
            sizes = [len(one.prompt) + len(one.committed) for one in request.starts]
            sizes += [len(one.tokens) for one in request.finishes]
            assert len(request.starts) < 2 or sum(sizes) <= self.constants["PART_BYTES"]


TestAnyOrderOfMany = AnyOrderOfMany.TestCase
TestAnyOrderOfMany.settings = examples(40)


def run_requests(limit, seed):
    """Run a batch of requests to their ends with a service whose drafts are mostly right.

    Returns the engine, the service, and the drafts of each sequence by its number of tokens.
    """
    rng = np.random.default_rng(seed)
    texts = {1000 + number: [1000 + number, *rng.integers(0, 50, 200).tolist()] for number in range(4)}
    wrong = {first: set(rng.integers(0, 200, 8).tolist()) for first in texts}

    def guess(text, limit):
        own = texts[text[0]]
        return [own[at] + (at in wrong[text[0]]) for at in range(len(text), min(len(own), len(text) + limit))]

    wire = connected(guess)
    engine = FakeEngine()
    drafted = {}
    for number, text in enumerate(texts.values()):
        engine.running[number] = Request(text, 1 + number)
        start(wire.client, number, text[: 1 + number])
    while engine.running:
        chosen = sorted(engine.running)
        drafts = wire.draft(engine.progress(chosen, [engine.limit(number, limit) for number in chosen]))
        for index, number in enumerate(chosen):
            drafted[number, engine.running[number].done] = drafts.tokens_of(index).tolist()
        engine.verify(chosen, drafts)
        for number in chosen:
            if engine.running[number].done == len(engine.running[number].text):
                engine.finish(wire.client, number)
    wire.settle()
    assert sorted(wire.service.learned.values()) == sorted(texts.values())
    return engine, wire.service, drafted


@pytest.mark.parametrize("limit", [1, 4, 16])
def test_the_fast_path_sends_the_same_requests_as_the_general_path(monkeypatch, limit):
    monkeypatch.setattr("drafter_service.client.protocol.secrets.token_hex", lambda size: "name")
    monkeypatch.setattr("drafter_service.client.sequences.time.monotonic", lambda: 0.0)
    engine, forwarded, forwarded_drafts = run_requests(limit, seed=5)
    assert (forwarded.drafted, forwarded.steps) == (engine.drafted, engine.steps)
    draft = Protocol.draft
    taken = []

    def without_the_fast_path(protocol, progress):
        running = protocol.sequences.running.values()
        taken.append(protocol.sequences.behind.isdisjoint(running))
        protocol.sequences.behind.update(running)
        return draft(protocol, progress)

    monkeypatch.setattr(Protocol, "draft", without_the_fast_path)
    _, general, general_drafts = run_requests(limit, seed=5)
    assert sum(taken) > 10
    assert forwarded_drafts == general_drafts
    assert [request.SerializeToString() for request in forwarded.requests] == [
        request.SerializeToString() for request in general.requests
    ]


def test_durations_are_sent_with_the_next_request():
    wire = connected(counting)
    start(wire.client, 1, [5])
    sent = []
    for number in range(6):
        steps = [StepTime(number + 1, 1, 0.5)]
        wire.draft(replace(progress_of({1: [6]}, limit=2), step_times=steps), in_time=number not in (1, 2))
        sent.append([each.tokens for one in wire.service.requests if one.HasField("batch") for each in times_of(one)])
    assert sent[1] == [1]
    wire.settle()
    wire.draft(progress_of({1: [6]}, limit=2))
    assert [each.tokens for one in wire.service.requests for each in times_of(one)] == [1, 2, 3, 4, 5, 6]


def times_of(request):
    return read_batch(request.batch).step_times if request.HasField("batch") else ()


def test_a_late_response_can_pause_drafting(monkeypatch):
    wire = connected(counting)
    start(wire.client, 1, [5])
    wire.draft(progress_of({1: []}, limit=2))
    answer = wire.service.answer

    def pausing(request):
        response = answer(request)
        response.drafts.pause_steps = 7
        return response

    wire.service.answer = pausing
    assert wire.draft(progress_of({1: [6]}, limit=2), in_time=False).pause_steps == 0
    wire.settle()
    wire.service.answer = answer
    pauses = [wire.draft(progress_of({1: [7]}, limit=2)).pause_steps for _ in range(3)]
    assert pauses == [7, 0, 0]


def test_names_that_are_too_long_are_refused():
    wire = connected()
    for name in ("session_id", "request_id"):
        with pytest.raises(ValueError, match=f"{name} has 514 bytes; the maximum is 512"):
            start(wire.client, 1, [5], **{name: "ä" * 257})
    start(wire.client, 1, [5], session_id="ä" * 256)


def test_the_arguments_of_all_calls_are_sent():
    wire = connected(counting)
    rollout = Rollout("problem", 3)
    wire.client.start(
        1, array([5]), hints=array([7, 8]), session_id="s", request_id="r", learn=False, rollout=rollout, seed=-4
    )
    start(wire.client, 2, [6])
    wire.draft(replace(progress_of({1: [], 2: []}, limit=2), other_tokens=3, other_sequences=2))
    wire.draft(replace(progress_of({1: [9, 9, 9]}, limit=2), steps=array([3])))
    finish(wire.client, 1, [9, 9], steps=2)
    finish(wire.client, 2, [])
    wire.settle()
    first, second = (one for request in wire.service.requests for one in request.starts)
    assert (unpacked(first.hints), unpacked(first.prompt), unpacked(first.committed)) == ([7, 8], [5], [])
    assert (first.session_id, first.request_id, first.learn, first.seed) == ("s", "r", False, -4)
    assert (first.rollout.group, first.rollout.version) == ("problem", 3)
    assert (second.session_id, second.learn, second.HasField("seed"), second.HasField("rollout")) == (
        "",
        True,
        False,
        False,
    )
    batches = [request.batch for request in wire.service.requests if request.HasField("batch")]
    assert [(unpacked(each.steps), each.other_tokens, each.other_sequences) for each in batches] == [
        ([], 3, 2),
        ([3], 0, 0),
    ]
    assert [(one.steps, one.learn) for request in wire.service.requests for one in request.finishes] == [
        (2, False),
        (0, True),
    ]


def test_a_later_change_of_the_prompt_array_is_not_sent():
    wire = Wire(FakeService())
    prompt = array([5, 6])
    wire.client.start(1, prompt, hints=None, session_id=None, request_id=None, learn=True)
    prompt[:] = 9
    wire.connect()
    wire.settle()
    assert wire.service.texts() == [[5, 6]]


def test_sequence_ids_can_be_reused():
    wire = connected(counting)
    for prompt in (5, 15):
        start(wire.client, 1, [prompt])
        with pytest.raises(ValueError, match="was offered 0 tokens"):
            wire.client.draft(progress_of({1: []}, limit=1, verified=1))
        assert wire.draft(progress_of({1: [prompt + 1]}, limit=1)).tokens.tolist() == [prompt + 2]
        finish(wire.client, 1, [])
        with pytest.raises(ValueError, match="sequence 1 was not started"):
            wire.client.draft(progress_of({1: []}, limit=1))
    wire.settle()
    assert sorted(wire.service.learned.values()) == [[5, 6], [15, 16]]
    assert wire.service.texts() == []


def test_token_ids_outside_the_vocabulary_are_not_sent():
    wire = connected(counting, model=pb.Model(vocab_size=10))
    start(wire.client, 1, [5])
    for call in (
        lambda: start(wire.client, 2, [10]),
        lambda: wire.client.draft(progress_of({1: [10]}, limit=1)),
        lambda: finish(wire.client, 1, [10]),
    ):
        with pytest.raises(ValueError, match="token id 10 is outside the vocabulary of 10 tokens"):
            call()
    assert wire.draft(progress_of({1: []}, limit=2)).tokens.tolist() == [6, 7]


def test_the_state_of_a_namespace_is_printed_with_advice_about_text_elsewhere():
    assert str(NamespaceState("a")) == "a"
    assert str(NamespaceState("a", 1234)) == "a (1,234 tokens)"
    assert NamespaceState("a", 1234).advice("give {}") == ""
    held = pb.Held(other="b", other_tokens=5000)
    advice = NamespaceState.of(pb.Welcome(namespace="a", held=held)).advice("give {}")
    expected = "namespace a is empty, but namespace b holds 5,000 tokens of the same tokenizer; to use that one, give b"
    assert advice == expected
    assert NamespaceState("a", 0, "b").advice("give {}") == expected.replace("5,000 tokens", "text")
    assert NamespaceState.of(pb.ObserveResponse(namespace="a")) == NamespaceState("a")
