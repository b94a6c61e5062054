"""What places behind a text are believed to gain, and what is learned of them."""

import numpy as np
import pytest

from engine.speculation import columns
from engine.speculation.columns import EACH, FIRST, Columns
from engine.speculation.token_budget import path_odds
from tests.engine.executor.kernels.backends import planted

MOST = 6
BELIEVED = FIRST * EACH ** np.arange(MOST)


def gains(known, odds, room):
    """What each place is to gain, for one sequence."""
    drafts = known.drafts([np.array(odds, np.float32)], [room])
    assert len(drafts) == 1
    return path_odds(drafts.accept_prob, drafts.parents, drafts.offsets)


def test_at_first_prepared_drafts_fit_and_what_is_looked_up_is_as_on_recorded_traffic():
    expected = np.minimum(1, BELIEVED + np.array([0.9, 0.45, 0, 0, 0, 0]))
    np.testing.assert_allclose(gains(Columns(MOST), [0.9, 0.5], MOST), expected, rtol=1e-5)
    np.testing.assert_allclose(gains(Columns(MOST), [], 2), BELIEVED[:2], rtol=1e-5)


def test_there_is_a_place_for_each_token_that_has_room():
    drafts = Columns(MOST).drafts([np.ones(2, np.float32), np.empty(0, np.float32)], [3, 0])
    assert drafts.offsets.tolist() == [0, 3, 3]
    assert drafts.parents.tolist() == [-1, 0, 1]


def simulated(known, rng, fits, kept, steps=600, sequences=8):
    """Notes what comes of drafts that fit so often; of those looked up each token is accepted so often."""
    for _ in range(steps):
        prepared = rng.random(sequences) < 0.7
        found = ~(prepared & (rng.random(sequences) < fits))
        accepted = np.minimum(rng.geometric(1 - kept, sequences) - 1, 4)
        known.note(prepared.tolist(), [4] * sequences, found.tolist(), accepted.tolist())
    return known


def is_near_the_truth(module, fits=0.4, kept=0.6):
    known = simulated(module.Columns(MOST), np.random.default_rng(0), fits, kept)
    share = 1 - 0.7 * fits
    found = share * kept ** np.arange(1, 5)
    right = np.allclose(gains(known, [], 4), found, atol=0.06)
    return right and np.allclose(gains(known, [0.5, 0.5], 4), found + np.array([fits / 2, fits / 4, 0, 0]), atol=0.08)


def test_odds_come_to_what_happens():
    assert is_near_the_truth(columns)
    assert is_near_the_truth(columns, fits=0.9, kept=0.2)


FAULTS = {
    "a token too many": ("place < accepted[:, None]", "place <= accepted[:, None]"),
    "of any draft": ("has_spare & is_found[:, None] & ", "has_spare & "),
    "fits if it was looked up": ("has_draft & ~is_found & ", "has_draft & "),
    "all fits": ("self._fitted / self._prepared * np", "np"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, tmp_path):
    assert not is_near_the_truth(planted(columns, *FAULTS[fault], tmp_path))


def test_what_is_no_longer_tried_is_tried_again():
    known = Columns(MOST)
    for _ in range(200):
        known.note([False], [MOST], [True], [0])
    assert gains(known, [], 1) < FIRST / 20
    for _ in range(400):
        known.note([False], [0], [False], [-1])
    assert gains(known, [], 1) > FIRST / 2


def test_a_step_of_nobody_says_nothing():
    known = Columns(MOST)
    known.note([], [], [], [])
    np.testing.assert_allclose(gains(known, [], MOST), BELIEVED, rtol=1e-5)
