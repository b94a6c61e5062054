"""Sampled drafts as the token budget sees them."""

import numpy as np

from engine.drafters.drafts import Drafts
from engine.speculation.speculation import PRIOR_RATE, DepthRates, hide_sampled
from ssd.types import DraftBatch, Path


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
