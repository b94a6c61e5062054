"""Keyed noise, and the tokens that are sampled with it."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from engine.sampling.choice import CONSIDERED, NONE, choose_rows
from engine.sampling.draft_sampler import DraftSampler
from engine.sampling.noise import gumbel_noise, gumbel_noise_of, mix64, sample_tokens
from engine.scheduling.request import Request, SamplingParams, sample_seed
from engine.scheduling.sequence import Sequence
from ssd.kernels.noise import noise_of

SPLITMIX_OF_ZERO = 0xE220A8397B1DCDAF
"""The first output of SplitMix64 seeded with 0, as published with the generator."""


def sampled_tokens_of(logits, temperature, count, *, seed_of=lambda index: index, position_of=lambda _: 7):
    """Return `count` tokens sampled from one row of logits, each with its own seed and position."""
    rows = torch.tensor(logits, dtype=torch.float32).expand(count, -1)
    seeds, positions = (torch.tensor([of(index) for index in range(count)]) for of in (seed_of, position_of))
    return sample_tokens(rows, torch.full((count,), temperature, dtype=torch.float64), seeds, positions)


def sample_slowly(logits, temperatures, seeds, positions, noise=gumbel_noise):
    """Return the tokens with the noise of all tokens, and `sample_tokens`' other arguments."""
    is_sampled = temperatures > 1e-5
    divisors = torch.where(is_sampled, temperatures, 1.0).float()[:, None]
    found = noise(seeds, positions, logits.shape[1])
    return (logits / divisors + found * is_sampled[:, None]).argmax(1)


@given(st.integers(0, 1 << 32), st.integers(1, 600), st.sampled_from([0.0, 1.0, 5.0, 30.0]), st.booleans())
def test_noise_that_is_not_computed_changes_no_token(seed, size, spread, is_masked):
    rng, count = np.random.default_rng(seed), 20
    logits = spread * rng.standard_normal((count, size)).astype(np.float32)
    logits[:, 1:][rng.random((count, size - 1)) < 0.5 * is_masked] = -np.inf
    temperatures = rng.choice([0.0, 0.3, 1.0, 2.0], count)
    arrays = logits, temperatures, rng.integers(-(1 << 63), 1 << 63, count), np.arange(count)
    rows = [torch.from_numpy(each) for each in arrays]
    assert sample_tokens(*rows).tolist() == sample_slowly(*rows).tolist()


def fits_softmax(tokens, logits, temperature):
    """Whether the tokens could be samples of the softmax, by a chi-square test at one in a million."""
    expected = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0).numpy() * len(tokens)
    observed = np.bincount(tokens, minlength=len(logits))
    return chisquare(observed, expected).pvalue > 1e-6


LOGITS = [0.0, 1.0, 2.0, -1.0, 0.5]
COUNT = 100_000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax_over_seeds(temperature):
    assert fits_softmax(sampled_tokens_of(LOGITS, temperature, COUNT), LOGITS, temperature)


def test_samples_follow_the_softmax_over_positions():
    tokens = sampled_tokens_of(LOGITS, 1.0, COUNT, seed_of=lambda _: 3, position_of=lambda index: index)
    assert fits_softmax(tokens, LOGITS, 1.0)


def test_rare_tokens_of_a_large_vocabulary_have_the_right_rate():
    logits = [0.0] * 300 + [3.0] * 5
    assert fits_softmax(sampled_tokens_of(logits, 1.0, COUNT), logits, 1.0)


@pytest.mark.parametrize("fault", ["forgotten temperature", "uniform in place of Gumbel noise", "one noise for all"])
def test_planted_faults_are_caught(fault, monkeypatch):
    temperature = 1.0
    seed_of = lambda index: index  # noqa: E731
    if fault == "forgotten temperature":
        temperature = 0.8
    elif fault == "one noise for all":
        seed_of = lambda _: 1  # noqa: E731
    else:
        uniform = lambda *key: torch.exp(-torch.exp(-gumbel_noise(*key)))  # noqa: E731
        monkeypatch.setitem(globals(), "sample_tokens", partial(sample_slowly, noise=uniform))
    assert not fits_softmax(sampled_tokens_of(LOGITS, temperature, COUNT, seed_of=seed_of), LOGITS, 1.0)


SAMPLES = [{"seed_of": lambda seed, index=index: sample_seed(seed, index)} for index in (1, 2)]


@pytest.mark.parametrize(
    "pair",
    [({}, {"seed_of": lambda index: index + 1}), ({}, {"position_of": lambda _: 8}), SAMPLES],
    ids=["seeds", "positions", "samples of a request"],
)
def test_neighboring_seeds_positions_and_samples_are_independent(pair):
    left, right = (sampled_tokens_of(LOGITS, 1.0, COUNT, **each) for each in pair)
    probabilities = torch.softmax(torch.tensor(LOGITS, dtype=torch.float64), 0).numpy()
    expected = np.outer(probabilities, probabilities).ravel() * COUNT
    assert chisquare(np.bincount(left * 5 + right, minlength=25), expected).pvalue > 1e-6


def test_mixing_is_splitmix64():
    golden = torch.tensor([-7046029254386353131])
    assert int(mix64(golden)[0]) & (2**64 - 1) == SPLITMIX_OF_ZERO


def test_temperatures_that_would_overflow_are_greedy():
    logits = torch.tensor([[1.0, 5.0, 2.0]])
    for temperature in (1e-300, 1e-39, 1e-6):
        one = torch.tensor([1])
        assert sample_tokens(logits, torch.tensor([temperature], dtype=torch.float64), one, one).tolist() == [1]


def test_samples_of_a_request_have_different_seeds():
    """The first one is the request's; those of neighboring seeds differ, and all are valid."""
    edges = [-(1 << 63), (1 << 63) - 1]
    seeds = {(seed, index): sample_seed(seed, index) for seed in (*range(50), *edges) for index in range(50)}
    assert all(seeds[seed, 0] == seed for seed, _ in seeds)
    assert len(set(seeds.values())) == len(seeds)
    for seed in seeds.values():
        SamplingParams(seed=seed)


@pytest.mark.parametrize("seed", [0, 5, -9, (1 << 63) - 1, -(1 << 63)])
def test_drafters_of_text_know_the_same_noise(seed):
    tokens = [0, 1, 4095, 200_000]
    for position in (0, 1, 100_000):
        expected = gumbel_noise_of(torch.tensor([seed]), torch.tensor([position]), torch.tensor([tokens]))[0]
        assert [noise_of(seed, position, token) for token in tokens] == pytest.approx(expected.tolist(), rel=1e-5)


@st.composite
def batches(draw):
    """Sequences, logits after drafts of them, the sequence of each row, and the length of the drafts."""
    temperatures = draw(st.lists(st.sampled_from([0.0, 1e-9, 0.3, 1.0]), min_size=1, max_size=3))
    sequences = []
    for temperature in temperatures:
        sampling = SamplingParams(temperature=temperature, seed=draw(st.integers(-(2**63), 2**63 - 1)))
        prompt = np.ones(draw(st.integers(1, 40)), np.uint32)
        sequences.append(Sequence(len(sequences), Request(prompt, sampling), 100))
    owner = sorted(draw(st.lists(st.integers(0, len(sequences) - 1), min_size=1, max_size=4)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    logits = rng.normal(0, 4, (len(owner), draw(st.sampled_from([1, 3, 256, 257, 700])))).astype(np.float32)
    logits[rng.random(logits.shape) < draw(st.sampled_from([0.0, 0.7, 1.0]))] = -np.inf
    return sequences, torch.from_numpy(logits), np.array(owner), draw(st.integers(0, 5))


@given(batches(), st.integers(1, 4))
def test_kernel_samples_like_pytorch(batch, count):
    sequences, logits, owner, depth = batch
    sampler = DraftSampler(sequences)
    found = sampler.sample(logits, owner, depth, count)
    lengths = np.array([len(sequence) for sequence in sequences])
    expected = sampler._sample_on_device(logits, owner, lengths[owner] + depth, count)
    assert found.tokens.tolist() == expected.tokens.tolist()
    exists = found.tokens != NONE
    np.testing.assert_allclose(found.scores[exists], expected.scores[exists], rtol=1e-4, atol=1e-7)
    assert found.q is None
    assert not found.has_q.any()


@pytest.mark.parametrize("likelier", [0, 1, CONSIDERED - 1, CONSIDERED, CONSIDERED + 50])
def test_ties_with_the_last_considered_token(likelier):
    """Among equally likely tokens, the first ones are considered."""
    logits = torch.zeros(1, CONSIDERED + 100)
    logits[0, 100 : 100 + likelier] = 1.0
    considered = [*range(100, 100 + likelier), *range(100), *range(100 + likelier, logits.shape[1])][:CONSIDERED]
    noisy = (logits + gumbel_noise(torch.tensor([3]), torch.tensor([5]), logits.shape[1]))[0, considered]
    expected = [considered[index] for index in noisy.topk(4).indices.tolist()]
    tokens, scores = np.full((1, 4), NONE), np.zeros((1, 4), np.float32)
    choose_rows(logits.numpy(), np.ones(1, np.float32), np.array([3]), np.array([5]), tokens, scores)
    assert tokens[0].tolist() == expected


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_numbers_are_not_chosen(temperature):
    tokens, scores = np.full((1, 2), NONE), np.zeros((1, 2), np.float32)
    keys = np.array([temperature], np.float32), np.array([3]), np.array([5])
    choose_rows(np.full((1, 300), np.nan, np.float32), *keys, tokens, scores)
    assert tokens.tolist() == [[NONE, NONE]]
