"""The depth of drafts follows from what forward passes and verified tokens cost and gain."""

import numpy as np
import pytest

from engine.drafters.draft_pool import DraftPool
from engine.drafters.model_based.pace import RATE_DECAY, TIME_DECAY, Pace
from engine.scheduling.plan import SequencePlan, StepPlan
from engine.scheduling.request import Request
from engine.scheduling.sequence import Sequence
from ssd.types import ROOT

STEP_S = 1.0
"""Duration of a step without drafts."""


def drafts_deeper(pace, *, sequences=1, others=0, prob=0.5, cost=0.1):
    """Whether to draft a second token for each of `sequences` sequences; prob: of the first tokens.

    others: number of sequences in the step that have no drafts.
    """
    pool = DraftPool()
    owner, column = np.arange(sequences), np.zeros((sequences, 1))
    pool.add(
        owner,
        np.full(sequences, ROOT),
        column.astype(np.int64),
        column.astype(np.float32),
        np.full((sequences, 1), prob, np.float32),
        np.full(sequences, -1),
        1,
    )
    request = Request(np.array([1], np.uint32))
    entries = [SequencePlan(Sequence(index, request, 9), 0, 1, produces=True) for index in owner.tolist()]
    plan = StepPlan(entries, cost=cost, seconds=STEP_S, sequences=sequences + others)
    return pace.should_draft_deeper(plan, pool, np.arange(len(pool)))


def pace_of(first_s, next_s=None, *, reached=0, accepted=0):
    """A pace after passes of these durations."""
    pace = Pace()
    for _ in range(5 if next_s is not None else 0):
        pace.record_forward(next_s, is_first=False)
    pace.record_forward(first_s, is_first=True)
    for _ in range(200):
        pace.record_acceptance(reached, accepted)
    return pace


@pytest.mark.parametrize("sequences", [1, 2, 16])
@pytest.mark.parametrize(("prob", "is_deeper"), [(0.3, True), (0.02, False)])
def test_the_depth_does_not_depend_on_the_number_of_equal_sequences(sequences, prob, is_deeper):
    """A step of more sequences takes as long, so that each token takes a smaller part of it."""
    assert drafts_deeper(pace_of(0.05), sequences=sequences, prob=prob) is is_deeper


@pytest.mark.parametrize(("sequences", "others", "cost"), [(1, 0, 0.3), (4, 0, 0.3), (4, 2, 0.3)])
@pytest.mark.parametrize(("passes", "reached", "accepted"), [([0.1], 0, 1), ([0.2, 0.05, 0.1], 3, 2)])
def test_drafts_get_deeper_if_tokens_per_second_increase(sequences, others, cost, passes, reached, accepted):
    pace, tried, kept, next_s = Pace(), 1.0, 1.0, 0.0
    for index, seconds in enumerate(passes):
        pace.record_forward(seconds, is_first=index == 0)
        if index > 0:
            next_s = TIME_DECAY * next_s + (1 - TIME_DECAY) * seconds if next_s else seconds
    for _ in range(20):
        pace.record_acceptance(reached, accepted)
        if reached:
            tried, kept = RATE_DECAY * tried + reached, RATE_DECAY * kept + accepted
    tokens_s = sequences * cost * STEP_S / (sequences + others)
    gain = sequences * kept / tried / ((next_s or sum(passes)) + tokens_s)
    now = 1 / (STEP_S + sum(passes) + tokens_s)
    # The probability at which a deeper draft has the same rate: gain * prob = now * (all + sequences * prob).
    prob = now * (sequences + others) / (gain - now * sequences)
    assert 0 < prob < 0.95
    assert drafts_deeper(pace, sequences=sequences, others=others, prob=1.03 * prob, cost=cost)
    assert not drafts_deeper(pace, sequences=sequences, others=others, prob=0.97 * prob, cost=cost)


def test_passes_delay_sequences_without_drafts_too():
    assert drafts_deeper(pace_of(0.05), prob=0.3)
    assert not drafts_deeper(pace_of(0.05), prob=0.3, others=15)
    # Their number does not change the time of a token.
    assert not drafts_deeper(pace_of(1e-6), prob=0.3, cost=0.9)
    assert not drafts_deeper(pace_of(1e-6), prob=0.3, cost=0.9, others=15)
    assert drafts_deeper(pace_of(1e-6), prob=0.3, cost=0.1, others=15)


def test_slow_passes_and_expensive_tokens_end_drafts():
    assert drafts_deeper(pace_of(0.05))
    assert not drafts_deeper(pace_of(0.05, 1.0))
    assert drafts_deeper(pace_of(1.0, 0.05))
    assert not drafts_deeper(pace_of(0.05), cost=0.9)


def test_drafts_end_earlier_after_rejections():
    assert drafts_deeper(pace_of(0.05, reached=1, accepted=1))
    assert not drafts_deeper(pace_of(0.05, reached=10, accepted=1))
    # Steps in which nothing was learned say nothing.
    assert drafts_deeper(pace_of(0.05, reached=0, accepted=1))
