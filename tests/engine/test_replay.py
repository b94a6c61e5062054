"""Recorded outputs replace the target's tokens."""

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.scheduling.request import Request, SamplingParams
from engine.speculation import verify
from ssd.baselines.none import NoDrafter
from tests.engine.chain import VOCAB, answer, chain_engine
from tests.engine.workload import StrictDrafter, replayed


def recorded_requests(count=8):
    """Requests whose record has half the length of the output, the same length or more, and requests without one."""
    rng = np.random.default_rng(2)
    lengths = (10, 20, 30, None)
    records = [None if size is None else rng.integers(1, VOCAB, size).astype(np.uint32) for size in lengths]
    return [
        Request(
            rng.integers(1, VOCAB, rng.integers(1, 12)).astype(np.uint32),
            SamplingParams(max_tokens=20),
            recorded=records[index % len(records)],
        )
        for index in range(count)
    ]


def replay(shape="path", *, in_flight=None, pages=100, drafts=True):
    """Run the requests together; return them, their completions and the engine. in_flight: None for eager steps."""
    config = EngineConfig(max_sequences=4, max_draft=5, max_step_tokens=64, draft_shape=shape)
    drafter = StrictDrafter(np.random.default_rng(0), shape) if drafts else NoDrafter()
    engine = chain_engine(config, pages, drafter, in_flight=in_flight)
    submitted = recorded_requests()
    for number, request in enumerate(submitted):
        if drafts:
            drafter.expect(number, request, replayed(request))
    completions = engine.generate(submitted, lambda _: engine.scheduler.check_integrity())
    return submitted, completions, engine


def outputs_are_recorded(submitted, completions):
    return all(one.tokens.tolist() == replayed(request) for request, one in zip(submitted, completions, strict=True))


WAYS = [("path", None), ("tree", None), ("path", 0), ("path", 1)]


@pytest.mark.parametrize(("shape", "in_flight"), WAYS)
@pytest.mark.parametrize("drafts", [False, True], ids=["alone", "drafts"])
def test_recorded_tokens_replace_the_targets(shape, in_flight, drafts):
    submitted, completions, engine = replay(shape, in_flight=in_flight, drafts=drafts)
    assert outputs_are_recorded(submitted, completions)
    # The target itself would have produced other tokens.
    assert all(replayed(one)[:10] != answer(one.prompt, 10) for one in submitted if one.recorded is not None)
    assert engine.scheduler.preemptions == 0
    accepted = sum(completion.accepted for completion in completions)
    assert accepted > 40 if drafts else accepted == 0


@pytest.mark.parametrize(("shape", "in_flight"), WAYS)
def test_a_preempted_sequence_continues_its_record(shape, in_flight):
    submitted, completions, engine = replay(shape, in_flight=in_flight, pages=11)
    assert outputs_are_recorded(submitted, completions)
    assert engine.scheduler.preemptions > 2


def test_recorded_steps_still_sample(monkeypatch):
    """Replayed steps run the same operations, so that they take as long as other steps."""
    calls = []
    greedy = verify.greedy_tokens
    monkeypatch.setattr(verify, "greedy_tokens", lambda logits: (calls.append(1), greedy(logits))[1])
    _, completions, _ = replay(drafts=False)
    assert len(calls) >= max(completion.steps for completion in completions)
