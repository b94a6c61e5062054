"""When networks run, and how deep they draft: the rules with given times, and steps in which networks are skipped."""

from dataclasses import replace

import numpy as np
import pytest

from engine.drafters.combined import CombinedDrafter
from engine.drafters.pricing import FIRST_GAIN, MAX_SKIPPED, MIN_SKIPPED, DraftDepth, SkipRule
from engine.engine import build_engine
from engine.scheduling.pages import PagePool
from engine.scheduling.scheduler import Scheduler
from ssd.baselines.none import NoDrafter
from ssd.budget.backoff import MAX_LOSS
from ssd.budget.token_budget import StepPrice
from tests.engine.drafters.networks import CONFIG, TOLERANCE, Recorder, requests, tokens_of
from tests.engine.drafters.test_combined import make_part
from tests.engine.steps import counted_plan

RATE = 2.0
"""Tokens per second."""


def drafts_deeper(*probs, next_s, least=0.0, reached=0, accepted=0):
    """Return whether a draft gets deeper after passes of this duration, and steps with these outcomes."""
    depth = DraftDepth()
    for seconds in (1e9, *[10.0] * 5, *[next_s] * 300):  # The first pass does not count.
        depth.record_forward(seconds)
    for _ in range(200):
        depth.record_acceptance(reached, accepted)
    return depth.price(StepPrice(RATE, least)).is_worthwhile(np.array(probs))


@pytest.mark.parametrize("least", [0.0, 0.2])
@pytest.mark.parametrize("probs", [(1.0,), (0.5, 0.5), (0.9, 0.1)])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_drafts_get_deeper_if_the_children_are_worth_a_pass(probs, least, rate):
    """Children below the minimum are not verified. Steps in which nothing was learned say nothing."""
    gain = sum(max(0.0, prob * rate - least) for prob in probs)
    reached, accepted = (0, 1) if rate == 1 else (10, 5)
    for ratio in (0.97, 1.03):
        found = drafts_deeper(*probs, next_s=ratio * gain / RATE, least=least, reached=reached, accepted=accepted)
        assert found == (ratio < 1)
    assert DraftDepth().price(None).is_worthwhile(np.zeros(1))


class Steps:
    """Runs a rule over steps whose networks take a given time and add a given number of tokens."""

    def __init__(self, *, rate, model_s, gain):
        """rate: tokens per second; None: it is not known."""
        self.rule, self.gain, self.model_s = SkipRule(), gain, model_s
        self.plan = counted_plan(0, price=None if rate is None else StepPrice(rate, 0.03))

    def run(self, expected):
        """Return whether the networks ran in a step; expected: tokens of each sequence without them."""
        expected = np.array(expected, np.float64)
        if not self.rule.should_run_networks(self.plan, expected):
            return False
        self.rule.learn(expected, expected + self.gain, self.model_s)
        return True


def test_networks_run_while_nothing_is_measured():
    steps = Steps(rate=None, model_s=100.0, gain=0.0)
    assert all(steps.run([5.0]) for _ in range(100))
    assert steps.rule.skipped == 0


@pytest.mark.parametrize(("model_s", "runs"), [(0.45, True), (0.55, False)])
def test_networks_run_if_tokens_per_second_rise(model_s, runs):
    """Six tokens per second; networks add 1.5 tokens to each of two sequences, so half a second is worth it."""
    steps = Steps(rate=6.0, model_s=model_s, gain=1.5)
    for _ in range(200):
        steps.run([1.0, 3.0])
    ran = [steps.run([1.0, 3.0]) for _ in range(1000)]
    assert all(ran) == runs
    # A third of a second is the time of a step.
    assert runs or model_s * sum(ran) == pytest.approx(MAX_LOSS * len(ran) / 3, rel=0.2)


def test_a_gain_is_assumed_before_any_was_observed():
    steps = Steps(rate=1.0, model_s=0.49 * FIRST_GAIN, gain=0.0)
    assert steps.run([0.0])  # the first step measures the time
    assert steps.run([0.0])
    assert not steps.run([0.0])  # the gain of the step before has reduced the mean


def test_gains_depend_on_what_the_others_offer():
    """Networks add two tokens where the others offer none, and none where they offer many."""
    steps = Steps(rate=3.0, model_s=0.5, gain=0.0)
    for _ in range(200):
        for offered, gain in ((0.0, 2.0), (5.0, 0.0)):
            steps.gain = gain
            steps.run([offered])
    assert steps.run([0.0])
    assert not steps.run([5.0])
    # The batch as a whole decides.
    steps.gain = np.array([2.0, 0.0])
    assert steps.run([0.0, 5.0])


def test_networks_are_measured_again():
    """Networks that were slow once are not skipped for ever."""
    for model_s, most in ((1000.0, MAX_SKIPPED), (1.1, 110), (0.2, MIN_SKIPPED)):
        steps = Steps(rate=1.0, model_s=model_s, gain=0.1)
        while steps.run([1.0]):
            pass
        assert [steps.run([1.0]) for _ in range(most)] == [False] * (most - 1) + [True]
        assert steps.rule.skipped == most
    steps = Steps(rate=1.0, model_s=1000.0, gain=1.0)
    steps.run([1.0])
    steps.model_s = 0.01
    assert any(steps.run([1.0]) for _ in range(MAX_SKIPPED + 1))
    ran = [steps.run([1.0]) for _ in range(40 * MAX_SKIPPED)]
    assert all(ran[-10:])


@pytest.mark.parametrize("kind", ["mtp", "draft-model", "medusa"])
def test_skipped_networks_catch_up(model, monkeypatch, kind):
    """Outputs and the drafts of later steps are the same as if the networks had run in each step."""
    recorder = Recorder(monkeypatch)
    rng = np.random.default_rng(3)
    chosen = []

    def should_run_networks(_rule, _plan, _expected):
        chosen.append(bool(rng.random() < 0.3))
        return chosen[-1]

    monkeypatch.setattr(SkipRule, "should_run_networks", should_run_networks)
    config = replace(CONFIG, draft_shape="tree", watermark=0.0)
    submitted = requests(0.8, count=6) + requests(0.8, count=6)
    plain = build_engine(model, config, NoDrafter()).generate(submitted)
    drafter = CombinedDrafter([make_part(each, model, True) for each in ("ssd", kind)], has_trees=True)
    engine = build_engine(model, config, drafter)
    engine.scheduler = Scheduler(config, PagePool(14, config.page_size))
    assert tokens_of(engine.generate(submitted)) == tokens_of(plain)
    assert engine.scheduler.preemptions > 0
    assert min(chosen.count(True), chosen.count(False)) > 10
    assert list(drafter.corpora()) == [drafter.parts[0].drafter.inner.corpus]
    if kind != "medusa":
        assert recorder.largest_difference(drafter.parts[1].drafter.head, model, count=30) < TOLERANCE
