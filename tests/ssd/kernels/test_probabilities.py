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


def draft_two_siblings(steps):
    """Draft two tokens for each context; the target produces one of them.

    In one long request a token follows context k with probability PROBS[k], and another token otherwise. Returns
    context and accept_prob of both, float64 [steps, 3].
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
            rows.append((context, probs.get(200 + context, 0.0), probs.get(300 + context, 0.0)))
            produced = 200 if rng.random() < PROBS[context] else 300
            drafter.draft(progress_of({1: [produced + context]}, limit=0))
    return np.array(rows)


def test_probabilities_of_siblings_match_their_frequencies():
    late = draft_two_siblings(2000)[1000:]
    for context, prob in enumerate(PROBS):
        probs = late[late[:, 0] == context, 1:]
        assert probs.mean(axis=0) == pytest.approx([prob, 1 - prob], abs=0.03 + 3 * math.sqrt(prob * (1 - prob) / 250))


@pytest.mark.parametrize("steps", [1, 2])
def test_running_means_follow_tokens_and_cost_of_steps(steps):
    config = DrafterConfig(capacity=CAPACITY, cost=0.1)
    with SuffixDrafter(config, corpus=Corpus(CAPACITY, 32)) as drafter:
        drafter.start(1, array([1, 2, 3] * 20))
        assert len(drafter.draft(progress_of({1: []}, limit=2)).tokens) == 2
        for _ in range(3000):
            progress = progress_of({1: [1, 2, 3]}, limit=2, verified=2)
            drafts = drafter.draft(replace(progress, steps=array([steps])))
            assert drafts.tokens.tolist() == [1, 2]
        assert speedup_of(drafter.budget) == pytest.approx(3 / steps / (1 + 2 * 0.1), rel=0.04)


def test_shares_use_only_samples_that_agree():
    for alive in range(1, SAMPLES + 1):
        buckets = SHARE_BUCKET[: alive + 1, alive].tolist()
        assert buckets[0] == 0
        assert all(1 <= bucket < SHARE_BUCKETS for bucket in buckets[1:])
        assert buckets == sorted(buckets)
        for votes in range(1, alive):
            assert abs(buckets[votes] - 1 - 11 * votes / alive) <= 1
    assert SHARE_BUCKET[32, 32] == SHARE_BUCKET[1, 1] == SHARE_BUCKETS - 1
