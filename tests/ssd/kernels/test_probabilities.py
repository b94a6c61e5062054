"""Learned probabilities approach frequencies.

The checks are statistical. Other tests show that they fail if learning is broken.
"""

import copy
import math
from functools import partial

import numba
import numpy as np
import pytest

from ssd import DrafterConfig, SuffixDrafter
from ssd.corpus.corpus import Corpus
from ssd.kernels.learned import LearnedTables
from ssd.kernels.probabilities import (
    CELL_COUNT,
    MEAN,
    SAMPLES,
    SEEN,
    SEEN_CAP,
    SHARE_BUCKET,
    SHARE_BUCKETS,
    learn_cell,
    logit,
    sigmoid,
)
from tests.curves import speedup_of
from tests.replay import progress_of
from tests.strategies import array

PROBS = (0.95, 0.8, 0.5, 0.2)
CAPACITY = 100_000


@numba.njit(error_model="numpy")
def predictions_while_learning(cells, logits, outcomes, cap):
    """Return a cell's probability before each outcome, from which it then learns."""
    predicted = np.empty(len(outcomes), np.float32)
    for index in range(len(outcomes)):
        predicted[index] = cells[0, MEAN]
        learn_cell(cells, logits, 0, outcomes[index], np.float32(cap))
    return predicted


@numba.njit(error_model="numpy")
def round_trip(prob):
    """Convert a probability to a logit and back."""
    return sigmoid(logit(prob))


class Cell:
    """A table of one cell."""

    def __init__(self):
        self.cells, self.logits = np.full((1, 2), 0.5, np.float32), np.zeros(1, np.float32)

    def learn(self, outcomes):
        return predictions_while_learning(self.cells, self.logits, np.asarray(outcomes, np.float32), SEEN_CAP)

    @property
    def prob(self):
        return float(self.cells[0, MEAN])


@pytest.mark.parametrize("prob", [0.02, 0.3, 0.9])
def test_a_cell_approaches_the_frequency_of_its_outcomes(prob):
    cell = Cell()
    predicted = cell.learn(np.random.default_rng(0).random(4000) < prob)
    # The cell averages over about SEEN_CAP events: allow three standard errors.
    error = 3 * math.sqrt(prob * (1 - prob) / SEEN_CAP)
    assert abs(cell.prob - prob) < error
    assert abs(predicted[1000:].mean() - prob) < error
    assert cell.cells[0, SEEN] == SEEN_CAP
    assert cell.logits[0] == pytest.approx(math.log(cell.prob / (1 - cell.prob)), abs=0.01)


def test_the_first_events_change_a_cell_more_than_later_ones():
    cell = Cell()
    first = cell.learn([1, 1, 1])
    assert first[0] == pytest.approx(0.5)
    assert first[1] > 0.8
    cell.learn([1] * 1000)
    assert cell.prob > 0.99
    cell.learn([0])
    assert cell.prob == pytest.approx(1 - 1 / SEEN_CAP, abs=0.01)
    cell.learn([0] * (5 * int(SEEN_CAP)))
    assert cell.prob < 0.02


def test_logits_are_bounded_and_convert_back():
    for prob in (0.001, 0.02, 0.5, 0.7, 0.999):
        assert round_trip(prob) == pytest.approx(prob, rel=0.02)
    assert 0 < round_trip(0.0) < 0.01
    assert 0.99 < round_trip(1.0) < 1


def test_initial_tables_are_probabilities_with_their_logits():
    tables = LearnedTables()
    cells, logits = tables.cells, tables.logits
    assert len(cells) == len(logits) == CELL_COUNT
    means = cells[:, MEAN].astype(float)
    assert (means > 0).all()
    assert (means < 1).all()
    assert np.allclose(logits, np.clip(np.log(means / (1 - means)), -6.9, 6.9), atol=0.01)
    assert (cells[:, SEEN] > 0).all()
    assert np.isfinite(tables.weights).all()


def the_opposite_is_learned(tables, before):
    """Change the tables after a step, given the tables before it, as if outcomes were reversed."""
    means, old = tables.cells[:, MEAN], before.cells[:, MEAN]
    moved = np.flatnonzero(means != old)
    means[moved] = np.clip(2 * old[moved] - means[moved], 0.001, 0.999)
    tables.logits[moved] = np.log(means[moved] / (1 - means[moved]))
    tables.weights[:] = 2 * before.weights - tables.weights


def learn_with(drafter, step, bug):
    """Run a step from which the drafter learns, then apply `bug`, if given, to the tables."""
    before = copy.deepcopy(drafter.corpus.learned) if bug else None
    step()
    if bug:
        bug(drafter.corpus.learned, before)


def calibration_error(probs, accepted):
    """Return the expected calibration error in ten bins."""
    bins = np.minimum((probs * 10).astype(int), 9)
    return sum(abs(probs[bins == at].sum() - accepted[bins == at].sum()) for at in range(10)) / len(probs)


def draft_two_siblings(steps, bug=None):
    """Draft two tokens for each context; the target produces one of them.

    In one long request a token follows context k with probability PROBS[k], and another token otherwise. Returns a
    row per step: context, accept_prob of both, whether the target produced the first.
    """
    rng = np.random.default_rng(0)
    rows = []
    config = DrafterConfig(capacity=CAPACITY, draft_shape="tree", cost=1e-6)
    with SuffixDrafter(config, corpus=Corpus(CAPACITY, 32)) as drafter:
        drafter.start(1, array([1]))
        for _ in range(steps):
            context = int(rng.integers(len(PROBS)))
            drafts = drafter.draft(progress_of({1: [100 + context]}, limit=8))
            children = drafts.parents == -1
            probs = dict(zip(drafts.tokens[children].tolist(), drafts.accept_prob[children].tolist(), strict=True))
            is_first = bool(rng.random() < PROBS[context])
            rows.append((context, probs.get(200 + context, 0.0), probs.get(300 + context, 0.0), is_first))
            progress = progress_of({1: [200 + context if is_first else 300 + context]}, limit=0)
            learn_with(drafter, partial(drafter.draft, progress), bug)
    return np.array(rows)


def assert_siblings_are_calibrated(rows):
    late = rows[len(rows) // 2 :]
    for context, prob in enumerate(PROBS):
        probs = late[late[:, 0] == context, 1:3]
        sampling = math.sqrt(prob * (1 - prob) / len(probs))
        assert abs(probs[:, 0].mean() - prob) < 0.03 + 3 * sampling
        assert abs(probs[:, 1].mean() - (1 - prob)) < 0.03 + 3 * sampling
    predicted, accepted = np.concatenate((late[:, 1], late[:, 2])), np.concatenate((late[:, 3], 1 - late[:, 3]))
    assert calibration_error(predicted, accepted) < 0.05


def test_probabilities_of_siblings_match_their_frequencies():
    assert_siblings_are_calibrated(draft_two_siblings(3000))


def test_wrong_probabilities_of_siblings_are_detected():
    with pytest.raises(AssertionError):
        assert_siblings_are_calibrated(draft_two_siblings(400, the_opposite_is_learned))


def test_running_means_follow_tokens_and_cost_of_steps():
    config = DrafterConfig(capacity=CAPACITY, cost=0.1)
    with SuffixDrafter(config, corpus=Corpus(CAPACITY, 32)) as drafter:
        drafter.start(1, array([1, 2, 3] * 20))
        assert len(drafter.draft(progress_of({1: []}, limit=2)).tokens) == 2
        for _ in range(5000):
            drafts = drafter.draft(progress_of({1: [1, 2, 3]}, limit=2, verified=2))
            assert drafts.tokens.tolist() == [1, 2]
        assert speedup_of(drafter.budget) == pytest.approx(3 / (1 + 2 * 0.1), rel=0.01)


def test_shares_use_only_samples_that_agree():
    for alive in range(1, SAMPLES + 1):
        buckets = SHARE_BUCKET[: alive + 1, alive].tolist()
        assert buckets[0] == 0
        assert all(1 <= bucket < SHARE_BUCKETS for bucket in buckets[1:])
        assert buckets == sorted(buckets)
        for votes in range(1, alive):
            assert abs(buckets[votes] - 1 - 11 * votes / alive) <= 1
    assert SHARE_BUCKET[32, 32] == SHARE_BUCKET[1, 1] == SHARE_BUCKETS - 1
