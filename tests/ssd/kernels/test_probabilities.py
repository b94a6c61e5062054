"""Learned probabilities approach frequencies; tests.ssd.kernels.test_estimate compares each step of learning."""

import math
from dataclasses import replace

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
    SHARE_BUCKET,
    SHARE_BUCKETS,
)
from tests.curves import speedup_of
from tests.replay import progress_of
from tests.strategies import array

PROBS = (0.95, 0.8, 0.5, 0.2)
CAPACITY = 100_000


def test_initial_tables_are_probabilities_with_their_logits():
    tables = LearnedTables.new()
    cells, logits = tables.cells, tables.logits
    assert len(cells) == len(logits) == CELL_COUNT
    means = cells[:, MEAN].astype(float)
    assert (means > 0).all()
    assert (means < 1).all()
    assert np.allclose(logits, np.clip(np.log(means / (1 - means)), -6.9, 6.9), atol=0.01)
    assert (cells[:, SEEN] > 0).all()
    assert np.isfinite(tables.weights).all()


def calibration_error(probs, accepted):
    """Return the expected calibration error in ten bins."""
    bins = np.minimum((probs * 10).astype(int), 9)
    return sum(abs(probs[bins == at].sum() - accepted[bins == at].sum()) for at in range(10)) / len(probs)


def draft_two_siblings(steps):
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
            drafter.draft(progress_of({1: [200 + context if is_first else 300 + context]}, limit=0))
    return np.array(rows)


def test_probabilities_of_siblings_match_their_frequencies():
    rows = draft_two_siblings(3000)
    late = rows[len(rows) // 2 :]
    for context, prob in enumerate(PROBS):
        probs = late[late[:, 0] == context, 1:3]
        sampling = math.sqrt(prob * (1 - prob) / len(probs))
        assert abs(probs[:, 0].mean() - prob) < 0.03 + 3 * sampling
        assert abs(probs[:, 1].mean() - (1 - prob)) < 0.03 + 3 * sampling
    predicted, accepted = np.concatenate((late[:, 1], late[:, 2])), np.concatenate((late[:, 3], 1 - late[:, 3]))
    assert calibration_error(predicted, accepted) < 0.05


@pytest.mark.parametrize("steps", [1, 2])
def test_running_means_follow_tokens_and_cost_of_steps(steps):
    config = DrafterConfig(capacity=CAPACITY, cost=0.1)
    with SuffixDrafter(config, corpus=Corpus(CAPACITY, 32)) as drafter:
        drafter.start(1, array([1, 2, 3] * 20))
        assert len(drafter.draft(progress_of({1: []}, limit=2)).tokens) == 2
        for _ in range(5000):
            progress = progress_of({1: [1, 2, 3]}, limit=2, verified=2)
            drafts = drafter.draft(replace(progress, steps=array([steps])))
            assert drafts.tokens.tolist() == [1, 2]
        assert speedup_of(drafter.budget) == pytest.approx(3 / steps / (1 + 2 * 0.1), rel=0.01)


def test_shares_use_only_samples_that_agree():
    for alive in range(1, SAMPLES + 1):
        buckets = SHARE_BUCKET[: alive + 1, alive].tolist()
        assert buckets[0] == 0
        assert all(1 <= bucket < SHARE_BUCKETS for bucket in buckets[1:])
        assert buckets == sorted(buckets)
        for votes in range(1, alive):
            assert abs(buckets[votes] - 1 - 11 * votes / alive) <= 1
    assert SHARE_BUCKET[32, 32] == SHARE_BUCKET[1, 1] == SHARE_BUCKETS - 1
