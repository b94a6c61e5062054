"""Steps of fixed shapes and steps in flight give the same tokens as eager steps, with any drafter."""

from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from tests.engine.chain import VOCAB, answer, chain_engine
from tests.engine.steps import AllTokens
from tests.engine.test_core import CONFIG
from tests.engine.trees import ScriptedDrafter


def mixed_requests():
    """Requests with all kinds of settings, some of which need the host."""
    settings = [
        {}, {"temperature": 0.9, "top_k": 5}, {"temperature": 0.9, "top_p": 0.8}, {"temperature": 1.2, "min_p": 0.1},
        {"logprobs": 2}, {"temperature": 0.8, "frequency_penalty": 0.5}, {"prompt_logprobs": 0},
        {"stop_token_ids": tuple(range(0, 300, 9))}, {"logit_bias": {7: 5.0}},
    ]  # fmt: skip
    rng = np.random.default_rng(5)
    return [
        Request(
            rng.integers(1, 60, rng.integers(1, 50)).astype(np.uint32),
            SamplingParams(max_tokens=int(rng.integers(1, 30)), seed=seed, **settings[seed % len(settings)]),
        )
        for seed in range(18)
    ]


def test_requests_that_need_the_host_can_be_mixed_with_others(model):
    """At most three requests run at once, so that the executors alternate."""
    submitted = mixed_requests()
    plain = build_engine(model, CONFIG, NoDrafter()).generate(submitted)
    engine = build_engine(model, replace(CONFIG, in_flight=1, max_sequences=3), build_drafter("ssd", DrafterConfig()))
    for late, expected in zip(engine.generate(submitted), plain, strict=True):
        assert late.tokens.tolist() == expected.tokens.tolist()
        assert late.finish_reason == expected.finish_reason
        if expected.logprobs is not None:
            np.testing.assert_allclose(late.logprobs.tokens, expected.logprobs.tokens, atol=1e-4)
    assert engine.scheduler.pages.free_count == engine.scheduler.pages.count


PROMPT = np.array([3, 1, 4, 1, 5], np.uint32)
TOKENS = 60


def run_and_log(drafter, selection=None, *, in_flight=1, **fields):
    """Run one request; return the order of launches and reads, and the completion."""
    config = EngineConfig(max_sequences=1, max_draft=4, max_step_tokens=64)
    engine = chain_engine(config, 40, drafter, selection, in_flight=in_flight)
    events, launch, commit = [], engine._graph.launch, engine._commit
    engine._graph.launch = lambda plan: (events.append("launch"), launch(plan))[1]
    engine._commit = lambda *arguments: (events.append("read"), commit(*arguments))[1]
    [completion] = engine.generate([Request(PROMPT, SamplingParams(max_tokens=TOKENS), **fields)])
    assert completion.tokens.tolist() == answer(PROMPT, TOKENS)
    assert engine.drafter_failures.count == 0
    return events, completion


def right_for(count):
    """A drafter whose first `count` draft tokens are right."""
    output = answer(PROMPT, TOKENS)

    def script(_, length):
        draft = output[length - len(PROMPT) :]
        return [token if place < count else (token + 1) % VOCAB for place, token in enumerate(draft)]

    return ScriptedDrafter(script)


@pytest.mark.parametrize(("right", "in_flight"), [(0, 0), (0, 1), (2, 0), (2, 1), (100, 0), (100, 1), (None, 0)])
def test_steps_with_drafts_or_none_in_flight_are_launched_after_the_results_are_read(right, in_flight):
    """Without drafts a step is launched ahead if one may be in flight."""
    events, completion = run_and_log(NoDrafter() if right is None else right_for(right), in_flight=in_flight)
    assert events == ["launch", "read"] * completion.steps
    assert completion.steps == -(-TOKENS // (1 + min(right or 0, 4)))


class NeverCalled(NoDrafter):
    def draft(self, progress):
        pytest.fail("a drafter that never drafts was called")


@pytest.mark.parametrize(
    ("drafter", "fields"),
    [(NeverCalled(), {}), (right_for(4), {"drafters": frozenset()}), (right_for(4), {"max_draft": 0})],
)
def test_steps_without_drafts_are_launched_before_the_results_are_read(drafter, fields):
    events, completion = run_and_log(drafter, **fields)
    assert events == ["launch", *["launch", "read"] * (TOKENS - 1), "read"]
    assert completion.steps == TOKENS


class Pauses(AllTokens):
    """A selection that verifies all tokens, and pauses for four committed steps after every third with drafts."""

    def __init__(self):
        self.drafted = self.paused = 0

    def admits(self, plan):
        return self.drafted < 3

    def record(self, plan, accepted, committed, seconds):
        assert seconds > 0
        self.drafted += plan.is_drafting
        # The step that was in flight at the end of a pause is not part of the next one.
        self.paused += plan.is_backing_off and self.drafted >= 3
        if self.paused >= 4:
            self.drafted = self.paused = 0


def test_steps_of_a_pause_are_launched_ahead_and_drafting_resumes():
    events, completion = run_and_log(right_for(4), Pauses())
    # What a step teaches counts from the step after the next one, which is launched before.
    paused = ["launch", *["launch", "read"] * 4, "read"]
    whole = [*["launch", "read"] * 4, *paused]
    assert events[: 2 * len(whole)] == whole * 2
    assert completion.accepted == completion.drafted > 0
