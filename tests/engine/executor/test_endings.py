"""Requests that end, stop or wait in any phase of a step of the graph executor leave the others alone, and leave nothing behind."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.drafters.tokens import NOT_STARTED
from engine.scheduling.request import FinishReason, Request, SamplingParams
from engine.scheduling.table import ADMISSION
from ssd.baselines.none import NoDrafter
from ssd.types import NO_LIMITS, DraftBatch, Path
from tests.engine.chain import END, VOCAB, answer, chain_engine

ROUTES = [(right, in_flight) for right in (None, 0, 2, 9) for in_flight in (0, 1)]
"""Numbers of right tokens of each draft, None without drafts, and of steps in flight."""


class Answering(NoDrafter):
    """Drafts the outputs of the requests, each draft with `right` right tokens; without drafts if that is None."""

    def __init__(self, right, outputs):
        self.limits = NoDrafter.limits if right is None else NO_LIMITS
        self.right, self.outputs, self.lengths = right, outputs, {}

    def start(self, sequence_id, prompt):
        self.lengths[sequence_id] = 0

    def draft(self, progress):
        paths = []
        for at, number in enumerate(progress.sequence_ids.tolist()):
            self.lengths[number] += int(progress.offsets[at + 1] - progress.offsets[at])
            rest = self.outputs[number][self.lengths[number] :][: int(progress.max_draft[at])]
            draft = [token if place < self.right else (token + 1) % VOCAB for place, token in enumerate(rest)]
            paths.append(Path(np.array(draft, np.uint32), np.ones(len(draft), np.float32)))
        return DraftBatch.from_paths(paths)

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        assert self.lengths.pop(sequence_id) + len(tokens) <= len(self.outputs[sequence_id]) or self.right is None


def check_nothing_is_held(engine):
    scheduler, guard = engine.scheduler, engine._speculation.drafter
    scheduler.pages.check_integrity([])
    assert scheduler.pages.free_count == scheduler.pages.count
    assert sorted(scheduler.table._free) == list(range(len(scheduler.table.sequences)))
    assert set(scheduler.table.sequences) == {None}
    assert not scheduler.table.state[:, ADMISSION].any()
    assert (guard.inner._reported[:, 0] == NOT_STARTED).all()
    assert not (guard._started or engine._speculation._started or engine._ended or engine._finished)
    assert not getattr(engine.drafter, "lengths", None)


def random_requests(rng, count, longest=20, prompt=12):
    requests = [
        Request(rng.integers(1, VOCAB, rng.integers(1, prompt)).astype(np.uint32), SamplingParams(int(most)))
        for most in rng.integers(1, longest, count)
    ]
    return requests, [answer(each.prompt.tolist(), each.sampling.max_tokens) for each in requests]


@pytest.mark.parametrize("ending", ["end token", "stop token", "stop string", "length"])
@pytest.mark.parametrize(("right", "in_flight"), ROUTES)
def test_outputs_end_at_any_place_of_a_draft(ending, right, in_flight):
    [other], [expected] = random_requests(np.random.default_rng(2), 1)
    stop, fields = {
        "end token": (None, {}), "length": (None, {}),
        "stop token": (6, {"stop_token_ids": (6,)}), "stop string": ("gh", {"stop": ("gh", "never")}),
    }[ending]  # fmt: skip
    for place in range(1, 11):
        record = np.random.default_rng(place).integers(1, 6, 12).astype(np.uint32)
        record[place - 1 : place + 1] = {"end token": (1, END), "length": (1, 1)}.get(ending, (6, 7))
        size = place + (ending != "stop token")
        sampling = SamplingParams(max_tokens=size if ending == "length" else 30, **fields)
        config = EngineConfig(max_sequences=2, max_draft=4, max_step_tokens=40)
        engine = chain_engine(config, 30, Answering(right, [record.tolist(), expected]), in_flight=in_flight)
        first = Request(np.ones(3, np.uint32), sampling, recorded=record)
        stopped, whole = engine.generate([first, other])
        assert (stopped.tokens.tolist(), stopped.stop_reason) == (record[:size].tolist(), stop)
        assert stopped.finish_reason is (FinishReason.LENGTH if ending == "length" else FinishReason.STOP)
        if ending == "stop string":
            assert stopped.text == "".join(chr(97 + token) for token in record[: size - 2])
        assert whole.tokens.tolist() == expected
        check_nothing_is_held(engine)


def cancel(engine, number):
    return engine.cancel(number)


def preempt(engine, number):
    sequence = engine.scheduler.find(number)
    for newer in reversed(engine.scheduler.running if sequence in engine.scheduler.running else []):
        if newer.sequence_id >= number:
            engine.scheduler._preempt(newer)


def cancel_after_preemption(engine, number):
    preempt(engine, number)
    return engine.cancel(number)


@pytest.mark.parametrize("is_observed", [True, False])
@pytest.mark.parametrize("act", [cancel, preempt, cancel_after_preemption])
@pytest.mark.parametrize(("right", "in_flight"), ROUTES)
def test_a_request_may_be_taken_out_after_any_step(act, right, in_flight, is_observed):
    """Two requests run, and two wait. Each of them is taken out after each step."""
    for moment in range(1, 16):
        requests, outputs = random_requests(np.random.default_rng(moment), 4)
        config = EngineConfig(max_sequences=2, max_draft=3, max_step_tokens=16)
        engine = chain_engine(config, 24, Answering(right, outputs), in_flight=in_flight)
        steps, taken, number = [], [], moment % 4

        def observe(report, engine=engine, steps=steps, taken=taken, number=number, moment=moment):
            steps.append(report)
            if len(steps) == moment:
                taken.append(act(engine, number))
                engine.scheduler.check_integrity()

        if is_observed:
            tokens = {at: each.tokens.tolist() for at, each in enumerate(engine.generate(requests, observe))}
        else:
            tokens = {engine.add(request): [] for request in requests}
            while engine.has_work:
                observe(engine.step())
                for at, new in steps[-1].tokens.items():
                    tokens[at] += new.tolist()
        for at, output in enumerate(outputs):
            is_cut = at == number and any(taken)
            assert tokens[at] == (taken[0].tokens.tolist() if is_cut else output)
            assert tokens[at] == output[: len(tokens[at])]
        check_nothing_is_held(engine)


@pytest.mark.parametrize(("right", "in_flight"), ROUTES)
def test_many_requests_share_six_pages(right, in_flight):
    requests, outputs = random_requests(np.random.default_rng(0), 60, longest=24, prompt=9)
    window = 6 * 4
    outputs = [output[: window - len(each.prompt)] for each, output in zip(requests, outputs, strict=True)]
    config = EngineConfig(max_sequences=3, max_draft=3, max_step_tokens=16, watermark=0.0)
    engine = chain_engine(config, 6, Answering(right, outputs), in_flight=in_flight)
    completions = engine.generate(requests, lambda _: engine.scheduler.check_integrity())
    assert [each.tokens.tolist() for each in completions] == outputs
    assert engine.scheduler.preemptions > 5
    check_nothing_is_held(engine)


def raises(_):
    raise RuntimeError("no idea")


def altered(**fields):
    return lambda batch: replace(batch, **{name: make(getattr(batch, name)) for name, make in fields.items()})


FAULTS = {
    "raises": raises,
    "no batch": lambda _: None,
    "no arrays": altered(tokens=list),
    "unknown token": altered(tokens=lambda tokens: tokens + np.uint32(VOCAB)),
    "no probability": altered(accept_prob=lambda values: values * np.float32(np.nan)),
    "another batch": lambda batch: DraftBatch.from_paths([]) if len(batch) else None,
    "too long": lambda batch: batch.from_paths([Path(np.ones(9, np.uint32), np.ones(9, np.float32))] * len(batch)),
    "a cycle": altered(parents=lambda parents: parents + np.int32(1)),
    "unknown sources": altered(source=lambda codes: codes + np.uint8(99)),
}


class Faulty(Answering):
    """Has a fault in every second call of a method."""

    def __init__(self, outputs, method, fault):
        super().__init__(2, outputs)
        original, calls = getattr(self, method), itertools.count()

        def call(*arguments, **options):
            result = original(*arguments, **options)
            return fault(result) if next(calls) % 2 else result

        setattr(self, method, call)


@pytest.mark.parametrize(
    ("method", "fault"), [("start", "raises"), ("finish", "raises"), *(("draft", fault) for fault in FAULTS)]
)
@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_faulty_drafter_changes_no_output(method, fault, in_flight, caplog):
    requests, outputs = random_requests(np.random.default_rng(1), 12)
    config = EngineConfig(max_sequences=4, max_draft=3, max_step_tokens=40)
    engine = chain_engine(config, 30, Faulty(outputs, method, FAULTS[fault]), in_flight=in_flight)
    completions = engine.generate(requests)
    assert [each.tokens.tolist() for each in completions] == outputs
    assert (engine.drafter_failures.count > 1) == (fault != "unknown sources")
    assert sum(each.accepted for each in completions) > 5
    caplog.clear()
    engine.drafter.lengths.clear()  # It keeps sequences whose `start` raised.
    check_nothing_is_held(engine)


@pytest.mark.parametrize("right", [None, 1])
def test_nothing_is_held_after_ten_thousand_requests(right):
    prompts = np.random.default_rng(0).integers(1, VOCAB, (10_000, 2)).astype(np.uint32)
    sampling = SamplingParams(max_tokens=2)
    answers = {prompt: answer(prompt, 2) for prompt in {tuple(prompt.tolist()) for prompt in prompts}}
    outputs = [answers[tuple(prompt.tolist())] for prompt in prompts]
    config = EngineConfig(max_sequences=100, max_draft=1, max_step_tokens=400)
    engine = chain_engine(config, 150, Answering(right, outputs), in_flight=1)
    completions = engine.generate([Request(prompt, sampling) for prompt in prompts])
    assert [each.tokens.tolist() for each in completions] == outputs
    check_nothing_is_held(engine)
