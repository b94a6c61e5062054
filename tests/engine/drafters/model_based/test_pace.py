"""The depth of drafts follows from what forward passes and verified tokens cost and gain."""

import numpy as np
import pytest

from engine.drafters.draft_pool import DraftPool
from engine.drafters.model_based.pace import Pace
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
