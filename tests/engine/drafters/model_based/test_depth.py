"""The depth of drafts follows from what forward passes and verified tokens cost and gain."""

import numpy as np
import pytest

from engine.drafters.model_based.depth import DraftDepth
from ssd.budget.token_budget import StepPrice

RATE = 2.0
"""Tokens per second."""


def depth_of(next_s, *, reached=0, accepted=0):
    """Return the depth after passes of this duration, and steps with these outcomes."""
    depth = DraftDepth()
    for _ in range(5):
        depth.record_forward(next_s)
    for _ in range(200):
        depth.record_acceptance(reached, accepted)
    return depth


def drafts_deeper(depth, *probs, least=0.0):
    return depth.should_draft_deeper(StepPrice(RATE, least), np.array(probs))


@pytest.mark.parametrize("least", [0.0, 0.2])
@pytest.mark.parametrize("probs", [(1.0,), (0.5, 0.5), (0.9, 0.1)])
def test_drafts_get_deeper_if_the_children_are_worth_a_pass(probs, least):
    gain = sum(max(0.0, prob - least) for prob in probs)
    assert drafts_deeper(depth_of(0.97 * gain / RATE), *probs, least=least)
    assert not drafts_deeper(depth_of(1.03 * gain / RATE), *probs, least=least)


def test_children_that_are_not_verified_gain_nothing():
    assert drafts_deeper(depth_of(1e-6), 0.3, least=0.2)
    assert not drafts_deeper(depth_of(1e-6), 0.15, 0.1, least=0.2)


def test_drafts_end_earlier_after_rejections():
    assert drafts_deeper(depth_of(0.1, reached=1, accepted=1), 0.5)
    assert not drafts_deeper(depth_of(0.1, reached=10, accepted=1), 0.5)
    # Steps in which nothing was learned say nothing.
    assert drafts_deeper(depth_of(0.1, reached=0, accepted=1), 0.5)


def test_the_duration_of_passes_follows_recent_ones():
    depth = depth_of(10.0)
    assert not drafts_deeper(depth, 1.0)
    for _ in range(50):
        depth.record_forward(0.1)
    assert drafts_deeper(depth, 1.0)
