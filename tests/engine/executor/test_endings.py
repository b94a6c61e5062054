"""Requests that end or are taken out in any phase of a step change no other output, and leave nothing behind."""

import itertools
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.drafters.options import DEFAULT_ADDRESS
from engine.drafters.registry import build_drafter
from engine.drafters.tokens import NOT_STARTED
from engine.engine import Engine
from engine.scheduling.request import FinishReason, Request, SamplingParams
from ssd.types import DraftBatch, Path
from tests.engine.chain import END, VOCAB, answer, chain_engine, decode
from tests.engine.drafters.kinds import WITHOUT_WEIGHTS, config_of, target_of
from tests.engine.integrity import check_integrity, check_pages
from tests.engine.trees import ScriptedDrafter

ROUTES = pytest.mark.parametrize(
    ("right", "in_flight"), [(None, 0), (None, 1), (0, 1), (2, 0), (2, 1), (9, 1), (2, None)]
)
"""Numbers of right tokens of each draft, None without drafts, and of steps in flight, None with the eager executor."""


class Answering(ScriptedDrafter):
    """Drafts outputs, with `right` right tokens in each draft, and holds nothing of sequences that have ended."""

    def __init__(self, right, requests, outputs):
        def script(number, length):
            at = number % len(requests)
            rest = [] if right is None else outputs[at][length - len(requests[at].prompt) :]
            return [token if place < right else (token + 1) % VOCAB for place, token in enumerate(rest)]

        super().__init__(script)

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        del self.lengths[sequence_id]


def engine_for(right, requests, outputs, *, pages=24, sequences=2, in_flight=1, drafter=None):
    config = EngineConfig(max_sequences=sequences, max_draft=3, max_step_tokens=8 * sequences, watermark=0.0)
    return chain_engine(config, pages, drafter or Answering(right, requests, outputs), in_flight=in_flight)


def check_nothing_is_held(engine):
    scheduler, guard = engine.scheduler, engine._speculation.drafter
    check_pages(scheduler.pages, [])
    assert sorted(scheduler.table._free) == list(range(len(scheduler.table.sequences)))
    assert set(scheduler.table.sequences) == {None}
    assert (guard.inner._reported[:, 0] == NOT_STARTED).all()
    assert not any((guard._started, engine._ended, engine.drafter.inner.lengths))


def random_requests(seed, count, longest=20, **sampling):
    """Requests and their outputs. sampling: settings of the last one."""
    rng = np.random.default_rng(seed)
    requests = [
        Request(
            rng.integers(1, VOCAB, rng.integers(1, 12)).astype(np.uint32),
            SamplingParams(int(most), **(sampling if index == count - 1 else {})),
        )
        for index, most in enumerate(rng.integers(1, longest, count))
    ]
    return requests, [answer(each.prompt.tolist(), each.sampling.max_tokens) for each in requests]


@pytest.mark.parametrize("ending", ["end token", "stop token", "stop string", "length"])
@ROUTES
def test_outputs_end_at_any_place_of_a_draft(ending, right, in_flight):
    [other], [expected] = random_requests(2, 1)
    for place in range(1, 11):
        record = np.random.default_rng(place).integers(1, 6, 12).astype(np.uint32)
        record[place - 1 : place + 1] = {"end token": (1, END), "length": (1, 1)}.get(ending, (6, 7))
        size = place + (ending != "stop token")
        stop, fields = {
            "stop token": (6, {"stop_token_ids": (6,)}), "stop string": ("gh", {"stop": ("gh", "h")}),
            "length": (None, {"max_tokens": size}), "end token": (None, {}),
        }[ending]  # fmt: skip
        fields["logprobs"] = 0 if place % 3 == 0 else None  # The host needs logits, so another route is taken.
        requests = Request(np.ones(3, np.uint32), SamplingParams(**fields), recorded=record), other
        engine = engine_for(right, requests, [record.tolist(), expected], in_flight=in_flight)
        stopped, whole = engine.generate(requests)
        assert (stopped.tokens.tolist(), stopped.stop_reason) == (record[:size].tolist(), stop)
        assert stopped.finish_reason is (FinishReason.LENGTH if ending == "length" else FinishReason.STOP)
        assert stopped.text == (decode(record[: size - 2]) if ending == "stop string" else None)
        assert stopped.logprobs is None or len(stopped.logprobs.tokens) == size
        assert whole.tokens.tolist() == expected
        check_nothing_is_held(engine)


def preempt(engine, number):
    for sequence in [each for each in engine.scheduler.running[::-1] if each.sequence_id >= number]:
        engine.scheduler._preempt(sequence)


@pytest.mark.parametrize("act", [Engine.cancel, preempt, lambda *both: preempt(*both) or Engine.cancel(*both)])
@ROUTES
def test_a_request_may_be_taken_out_after_any_step(act, right, in_flight):
    """Two requests run, and two wait. The observer of a step takes one out. The last one needs log-probabilities."""
    for moment in range(1, 16):
        requests, outputs = random_requests(moment, 4, logprobs=1)
        engine = engine_for(right, requests, outputs, in_flight=in_flight)
        steps, taken, number = itertools.count(1), [], moment % 4

        def observe(_, engine=engine, steps=steps, taken=taken, number=number, moment=moment):
            if next(steps) == moment:
                taken.append(act(engine, number))
                check_integrity(engine.scheduler)

        for at, completion in enumerate(engine.generate(requests, observe)):
            assert completion.tokens.tolist() == outputs[at][: len(completion.tokens)]
            if at == number and any(taken):
                assert completion.finish_reason is FinishReason.ABORT
                for name in ("steps", "drafted", "accepted"):
                    assert getattr(completion, name) == getattr(taken[0], name)
            else:
                assert completion.tokens.tolist() == outputs[at]
        check_nothing_is_held(engine)


@pytest.fixture
def drafter(request, kind, corpus_file):
    """A drafter of a kind, and a sidecar if it needs one."""
    config, address = config_of(kind, corpus_file, capacity=10_000, max_draft=13), DEFAULT_ADDRESS
    if kind == "ssd-remote":
        request.getfixturevalue("server")
        address = request.getfixturevalue("socket_address")
        config = replace(config, options={"deadline_s": "30"})  # for busy machines
    return build_drafter(kind, config, target_of(), address=address, warn=pytest.fail)


@pytest.mark.parametrize(("kind", "in_flight"), [("ssd", None), *((kind, "any") for kind in WITHOUT_WEIGHTS)])
def test_with_every_drafter_requests_may_be_taken_out(drafter, kind, in_flight):
    """In many steps, at random. None: the eager executor. `any`: 0 or 1 steps in flight, at random."""
    rng = np.random.default_rng(7)
    requests, outputs = (8 * each for each in random_requests(7, 6, longest=50))
    with closing(engine_for(None, [], [], pages=30, sequences=5, in_flight=in_flight, drafter=drafter)) as engine:

        def observe(_):
            check_integrity(engine.scheduler)
            running = [each.sequence_id for each in engine.scheduler.running]
            if running and rng.random() < 0.1:
                (preempt if rng.random() < 0.7 else Engine.cancel)(engine, int(rng.choice(running)))

        completions = engine.generate(requests, observe)
        assert engine.scheduler.preemptions > 0
        check_pages(engine.scheduler.pages, [])
    aborted = [each.finish_reason is FinishReason.ABORT for each in completions]
    assert 0 < sum(aborted) < 20
    for completion, output, is_cut in zip(completions, outputs, aborted, strict=True):
        assert completion.tokens.tolist() == (output[: len(completion.tokens)] if is_cut else output)
    if kind not in ("none", "ssd-remote"):
        assert sum(each.accepted for each in completions) > 0


@pytest.mark.parametrize("in_flight", [None, 0, 1])
@pytest.mark.parametrize("is_in_step", [True, False])
def test_nothing_is_held_after_an_interruption(is_in_step, in_flight):
    """In a call of the drafter, before which outputs may have ended in the same step; or by the observer."""
    for seed, moment in itertools.product(range(4), range(1, 9)):
        requests, outputs = random_requests(seed, 6, longest=12)
        engine, calls = engine_for(2, requests, outputs, in_flight=in_flight), itertools.count(1)
        script = engine.drafter.inner.script

        def interrupt(*arguments, calls=calls, moment=moment, script=script):
            if next(calls) == moment:
                raise KeyboardInterrupt
            return script(*arguments) if is_in_step else None

        engine.drafter.inner.script = interrupt if is_in_step else script
        with pytest.raises(KeyboardInterrupt):
            engine.generate(requests, (lambda _: None) if is_in_step else interrupt)
        check_nothing_is_held(engine)
        assert [each.tokens.tolist() for each in engine.generate(requests)] == outputs


FAULTS = {
    "raises": lambda _: 1 / 0,
    "no batch": lambda _: None,
    "unknown tokens": lambda batch: replace(batch, tokens=batch.tokens + np.uint32(VOCAB)),
    "another batch": lambda _: DraftBatch.empty(99),
    "too long": lambda batch: batch.from_paths([Path(np.ones(9, np.uint32), np.ones(9, np.float32))] * len(batch)),
}


@pytest.mark.parametrize(
    ("method", "fault"), [("start", "raises"), ("finish", "raises"), *(("draft", f) for f in FAULTS)]
)
@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_faulty_drafter_changes_no_output(method, fault, in_flight, caplog):
    """Every second call of a method has the fault."""
    requests, outputs = random_requests(1, 12)
    drafter = Answering(2, requests, outputs)
    original, calls = getattr(drafter, method), itertools.cycle((lambda result: result, FAULTS[fault]))
    setattr(drafter, method, lambda *arguments, **options: next(calls)(original(*arguments, **options)))
    engine = engine_for(2, requests, outputs, sequences=4, in_flight=in_flight, drafter=drafter)
    completions = engine.generate(requests)
    assert [each.tokens.tolist() for each in completions] == outputs
    assert engine.drafter_failures.count > 1
    assert sum(each.accepted for each in completions) > 5
    caplog.clear()
    drafter.lengths.clear()  # of sequences whose `start` raised
    check_nothing_is_held(engine)
