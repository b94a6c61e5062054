"""Requests choose whether and how much is drafted for them; the token budget does not see sampled tokens."""

from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.drafters.drafts import Drafts
from engine.engine import build_engine
from engine.scheduling.request import Request, SamplingParams
from engine.speculation.speculation import PRIOR_RATE, DepthRates, hide_sampled
from ssd.baselines.none import NoDrafter
from ssd.types import DraftBatch, Path
from tests.engine.chain import VOCAB, answer, chain_engine
from tests.engine.drafters.networks import new_drafter
from tests.engine.steps import AllTokens, each_of
from tests.engine.trees import ScriptedDrafter

CONFIG = EngineConfig(max_sequences=6, max_draft=4, max_step_tokens=64)
TOKENS = 24
NONE = frozenset()


class Oracle(ScriptedDrafter):
    """Drafts what the target produces, and records which sequences it drafts for and how much."""

    def __init__(self, expected):
        """expected: prompt and output of each sequence."""
        super().__init__(lambda sequence_id, length: expected[sequence_id][length:])
        self.calls = []
        """Pairs of a sequence id and the largest number of draft tokens."""

    def tree(self, sequence_id, length, limit):
        self.calls.append((sequence_id, limit))
        return super().tree(sequence_id, length, limit)


def asked_for(*choices):
    """Return requests of different prompts with these fields."""
    rng = np.random.default_rng(5)
    sampling = SamplingParams(max_tokens=TOKENS)
    return [Request(rng.integers(1, VOCAB, 5).astype(np.uint32), sampling, **choice) for choice in choices]


def run(requests, *, in_flight=None, selection=None, drafters=("a", "b")):
    outputs = [answer(request.prompt, TOKENS) for request in requests]
    drafter = Oracle([[*request.prompt, *output] for request, output in zip(requests, outputs, strict=True)])
    engine = chain_engine(CONFIG, 60, drafter, selection, in_flight=in_flight, drafters=drafters)
    reports = []
    completions = engine.generate(requests, reports.append)
    assert [completion.tokens.tolist() for completion in completions] == outputs
    assert engine._speculation.drafter.failures.count == 0
    return drafter, completions, reports


@pytest.mark.parametrize("in_flight", [None, 0, 1])
def test_each_request_is_drafted_for_as_it_asks(in_flight):
    requests = asked_for({}, {"drafters": NONE}, {"max_draft": 2}, {"max_draft": 0}, {"drafters": frozenset("b")})
    drafter, completions, reports = run(requests, in_flight=in_flight)
    longest = [0] * len(requests)
    for report in reports:
        for result in each_of(report.result):
            longest[result.sequence_id] = max(longest[result.sequence_id], result.drafted)
    assert longest == [4, 0, 2, 0, 4]
    assert [completion.drafted > 0 for completion in completions] == [most > 0 for most in longest]
    assert completions[0].steps < completions[2].steps < completions[1].steps
    # Once at the end, to report its steps.
    assert [entry for entry in drafter.calls if entry[0] in (1, 3)] == [(1, 0), (3, 0)]


@pytest.mark.parametrize("in_flight", [None, 0, 1])
def test_steps_without_drafted_requests_do_not_call_the_drafter(in_flight):
    drafter, completions, reports = run(asked_for({"drafters": NONE}, {"max_draft": 0}), in_flight=in_flight)
    assert drafter.calls == [(0, 0), (1, 0)]
    assert [completion.drafted for completion in completions] == [0, 0]
    assert not any(report.is_backing_off for report in reports)


class Backoff(AllTokens):
    """A selection for which drafting is not worthwhile in every second step."""

    def __init__(self):
        self.plans = []

    def admits(self, plan):
        return len(self.plans) % 2 == 0

    def price(self, plan):
        assert plan.producers == 2  # All producing sequences, drafted for or not, as each yields a token.
        return super().price(plan)

    def select(self, plan, drafts, usable):
        assert plan.producers == len(drafts) == len(usable) == 2
        return usable

    def record(self, plan, accepted, committed, seconds):
        self.plans.append(plan)


def test_steps_in_which_drafting_does_not_pay_are_reported():
    selection = Backoff()
    _, _, reports = run(asked_for({"max_draft": 1}, {"drafters": NONE})[:2], selection=selection)
    # The last step of a request has no room for a draft.
    drafting = [0 in report.tokens and 0 not in report.finished for report in reports]
    assert [report.is_backing_off for report in reports] == [
        index % 2 == 1 and is_drafting for index, is_drafting in enumerate(drafting)
    ]
    assert (
        sum(plan.is_drafting for plan in selection.plans)
        == sum(drafting) - sum(each.is_backing_off for each in reports)
        > 3
    )


@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_distributions_of_sampled_drafts_belong_to_their_requests(model, verification):
    """Requests without drafts among them change no output."""
    config = replace(CONFIG, max_step_tokens=256, kv_memory_mib=1, verification=verification)
    rng = np.random.default_rng(2)
    drafted, undrafted = (
        [
            Request(
                rng.integers(1, 60, 12).astype(np.uint32),
                SamplingParams(max_tokens=16, temperature=0.8, seed=seed, ignore_eos=True),
                drafters=drafters,
            )
            for seed in range(3)
        ]
        for drafters in (None, NONE)
    )

    def outputs(requests, *, has_drafter=True):
        drafter = new_drafter("mtp", model, config) if has_drafter else NoDrafter()
        completions = build_engine(model, config, drafter).generate(requests)
        for request, completion in zip(requests, completions, strict=True):
            assert (completion.drafted > 0) is (has_drafter and request.is_drafted)
        return [completion.tokens.tolist() for completion in completions]

    together = outputs([undrafted[0], drafted[0], drafted[1], undrafted[1], undrafted[2], drafted[2]])
    assert [together[index] for index in (1, 2, 5)] == outputs(drafted)
    assert [together[index] for index in (0, 3, 4)] == outputs(undrafted, has_drafter=False)


def drafts_of(*lengths):
    return DraftBatch.from_paths([Path(np.full(n, 7, np.uint32), np.full(n, 0.25)) for n in lengths])


def shown(rates, lengths, sampled, rooms):
    return hide_sampled(Drafts(drafts_of(*lengths)), np.array(sampled), np.array(rooms), rates)


def test_sampled_drafts_are_as_deep_as_the_deepest_before_and_the_room():
    rates = DepthRates(16)
    first = shown(rates, [4, 2], [True, False], [16, 16])
    assert np.diff(first.offsets).tolist() == [0, 2]
    # The length of the present draft may depend on its tokens, so it is not shown.
    second = shown(rates, [1, 3, 5, 2], [True, True, True, False], [16, 3, 16, 16])
    assert np.diff(second.offsets).tolist() == [4, 3, 4, 2]
    np.testing.assert_allclose(second.accept_prob, [*[PRIOR_RATE] * 11, 0.25, 0.25], rtol=1e-6)
    assert np.diff(shown(rates, [1], [True], [16]).offsets).tolist() == [5]


def test_rates_are_fractions_of_the_tokens_whose_parent_was_accepted():
    rates = DepthRates(4)
    rates.deepest = 4
    for accepted in (1, 3) * 400:
        rates.record(3, accepted)
    # One of two second tokens is accepted, and a third token only after a second. No fourth one was verified.
    np.testing.assert_allclose(rates.path(4).accept_prob, [1, 0.5, 1, PRIOR_RATE], atol=0.02)


def test_rates_recover_after_a_bad_phase():
    """Rates of depths that are no longer verified return to the prior, else these depths would never be tried again."""
    rates = DepthRates(4)
    rates.deepest = 4
    for accepted in (0, 1) * 400:
        rates.record(4, accepted)
    assert rates.path(4).accept_prob[1] < 0.02
    for _ in range(1000):
        rates.record(1, 1)
    np.testing.assert_allclose(rates.path(4).accept_prob, [1, *[PRIOR_RATE] * 3], atol=0.02)
