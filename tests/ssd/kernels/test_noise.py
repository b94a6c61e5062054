"""Estimates given the target's noise, compared with slow references, and drafts for a target that samples with it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.kernels.fallback import FoundFallbacks
from ssd.kernels.jit import outline
from ssd.kernels.noise import (
    LEAST_LEFT,
    MEAN_NOISE,
    RATE,
    estimate_given_noise,
    fallbacks_given_noise,
    learn_given_noise,
    noise_of,
)
from ssd.kernels.probabilities import ESTIMATE_COLUMNS, FINAL, LOG_PROB, NOISE, NOISE_WEIGHTS
from ssd.replay import replay
from tests.replay import drafter_of, recording_of
from tests.strategies import examples

SEED, POSITION = 12, 34


@outline
def key_of(seed, position):
    """Return the key of a position: SplitMix64 twice."""
    key = np.uint64(seed)
    for added in (np.uint64(0), np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)):
        key = key + added
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key = key ^ (key >> np.uint64(31))
    return key


@outline
def run(candidates, estimates, weights, token):
    """Estimate the candidates of a node, then learn from the target's token."""
    total = np.float32(0.0)
    for index in range(len(estimates)):
        total += estimates[index, FINAL]
    total = estimate_given_noise(candidates, estimates, len(estimates), total, key_of(SEED, POSITION), weights)
    estimated = estimates.copy()
    learn_given_noise(candidates, estimates, len(estimates), token, weights)
    return total, estimated


@outline
def run_fallbacks(tokens, probs, left, weights):
    fallbacks_given_noise(FoundFallbacks(tokens, probs), len(tokens), np.float32(left), key_of(SEED, POSITION), weights)


def log_probs(probs, noise, weights):
    """Return the log-probabilities of the candidates, and of none of them, last."""
    scaled = probs / max(1.0, probs.sum())
    scores = weights[0] * np.log(np.maximum(scaled, 1e-6)) + weights[1] * noise
    none = weights[2] * np.log(max(1 - probs.sum(), LEAST_LEFT)) + weights[3]
    scores = np.append(scores, none)
    return scores - np.log(np.exp(scores).sum())


@st.composite
def nodes(draw):
    """Return probabilities of candidates, weights, and the index of the right one, or their number."""
    size = draw(st.integers(0, 6))
    probs = np.array(draw(st.lists(st.floats(1e-4, 1.0), min_size=size, max_size=size)), np.float32)
    weights = draw(st.lists(st.floats(-2, 2), min_size=NOISE_WEIGHTS, max_size=NOISE_WEIGHTS))
    return probs, np.array(weights, np.float32), draw(st.integers(0, size))


@given(nodes())
@examples(200)
def test_probabilities_and_learning_agree_with_a_softmax(node):
    probs, weights, right = node
    tokens = np.arange(100, 100 + len(probs), dtype=np.int32)
    noise = np.array([noise_of(SEED, POSITION, int(token)) for token in tokens])
    estimates = np.zeros((len(probs), ESTIMATE_COLUMNS), np.float32)
    estimates[:, FINAL] = probs
    learned = weights.copy()
    token = tokens[right] if right < len(probs) else 7
    total, estimated = run(tokens[:, None], estimates, learned, np.uint32(token))
    expected = np.exp(log_probs(probs.astype(float), noise, weights))
    np.testing.assert_allclose(estimated[:, FINAL], expected[:-1], rtol=1e-3, atol=1e-5)
    assert total == pytest.approx(1 - expected[-1], abs=1e-3)
    np.testing.assert_allclose(estimated[:, NOISE], noise, rtol=1e-5)
    assert (estimated[:, LOG_PROB] <= 0).all()
    for index in range(NOISE_WEIGHTS):
        step = np.eye(NOISE_WEIGHTS)[index] * 1e-4
        above, below = (log_probs(probs.astype(float), noise, weights + sign * step)[right] for sign in (1, -1))
        assert (learned[index] - weights[index]) / RATE == pytest.approx((above - below) / 2e-4, abs=0.02)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), st.floats(0.1, 1.0))
def test_fallback_candidates_share_what_is_left(shares, left):
    probs = np.array(shares, np.float32) / np.float32(sum(shares)) * np.float32(0.7 * left)
    tokens = np.arange(len(probs), dtype=np.uint32)
    weights = np.array((1.2, 0.5, 0.5, -0.5), np.float32)
    found = probs.copy()
    run_fallbacks(tokens, found, left, weights)
    noise = np.array([noise_of(SEED, POSITION, int(token)) for token in tokens])
    scores = np.append(1.2 * np.log(probs / left) + 0.5 * noise, 1.2 * np.log(0.3) + 0.5 * MEAN_NOISE)
    expected = np.exp(scores) / np.exp(scores).sum() * left
    np.testing.assert_allclose(found, expected[:-1], rtol=1e-3)


def sampled_steps(seed_given, requests=120, length=40):
    """Return the steps of a drafter for a target that samples from a Markov chain with keyed noise."""
    rng, texts = np.random.default_rng(0), []
    chain = np.log(rng.dirichlet(np.full(4, 0.8), size=32))
    following = np.stack([rng.permutation(32)[:4] for _ in range(32)])
    for request in range(requests):
        texts.append([request % 8])
        for position in range(1, length + 1):
            last = texts[-1][-1]
            noise = [noise_of(request, position, int(token)) for token in following[last]]
            texts[-1].append(int(following[last][np.argmax(chain[last] + noise)]))
    recording = recording_of([(text[:1], text[1:]) for text in texts])
    with drafter_of(capacity=8192, max_draft=8, cost=0.02) as drafter:
        counts = replay(recording, drafter, max_draft=8, options=lambda request: {"seed": seed_given(request)})
    return counts.steps[requests // 4 :].sum()


def test_a_known_noise_reduces_the_steps():
    unknown, known = sampled_steps(lambda _: None), sampled_steps(lambda request: request)
    assert known < 0.9 * unknown
    # A wrong noise, such as that of another request, gains nothing.
    assert sampled_steps(lambda request: request + 1) > 0.97 * unknown
