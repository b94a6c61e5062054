"""Keyed noise, truncation, and the frequencies of the tokens that are sampled with them.

That the kernels sample like PyTorch is tested in tests/engine/executor/kernels.
"""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from engine.sampling import noise as sampling
from engine.sampling.choice import CONSIDERED, NONE, choose_rows
from engine.sampling.draft_sampler import DraftSampler
from engine.sampling.noise import Limits, gumbel_noise, gumbel_noise_of, mix64, sample_tokens, truncate
from engine.scheduling.request import Request, SamplingParams, sample_seed
from engine.scheduling.sequence import Sequence
from ssd.kernels.noise import noise_of
from tests.engine import naive_sampling as naive

SPLITMIX_OF_ZERO = 0xE220A8397B1DCDAF
"""The first output of SplitMix64 seeded with 0, as published with the generator."""

row_limits = st.tuples(
    st.integers(-1, 15), st.one_of(st.just(1.0), st.floats(1e-9, 1)), st.one_of(st.just(0.0), st.floats(0, 1))
)


def limits_of(settings):
    top_k, top_p, min_p = zip(*settings, strict=True)
    reals = (torch.tensor(column, dtype=torch.float64) for column in (top_p, min_p))
    return Limits(torch.tensor(top_k), *reals, 1000)


@given(st.data())
def test_kept_tokens_equal_those_of_a_loop(data):
    """Rows with ties and forbidden tokens, each with its own settings, in one batch."""
    size = data.draw(st.integers(1, 12))
    score = st.one_of(st.integers(-16, 16).map(lambda n: n / 4), st.just(float("-inf")))
    row = st.lists(score, min_size=size, max_size=size).filter(lambda row: max(row) > float("-inf"))
    scores = data.draw(st.lists(row, min_size=1, max_size=5))
    settings = data.draw(st.lists(row_limits, min_size=len(scores), max_size=len(scores)))
    left = truncate(torch.tensor(scores), limits_of(settings))
    for before, after, setting in zip(scores, left.tolist(), settings, strict=True):
        expected = naive.kept(before, *setting)
        assert {token for token, value in enumerate(after) if value > float("-inf")} == expected
        assert all(after[token] == before[token] for token in expected)


@given(st.lists(row_limits, min_size=2, max_size=6), st.integers(0, 1000))
def test_a_row_does_not_depend_on_the_other_rows(settings, seed):
    scores = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(settings), 500)).astype(np.float32))
    together = truncate(scores, limits_of(settings))
    for index in range(len(settings)):
        alone = truncate(scores[index : index + 1], limits_of(settings[index : index + 1]))
        assert torch.equal(alone[0], together[index])


LOGITS = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 0.2]
COUNT = 100_000
INDICES = torch.arange(COUNT)
SETTINGS = {
    "top_k": (0.8, 3, 1.0, 0.0),
    "top_p": (1.3, 0, 0.7, 0.0),
    "min_p": (1.0, 0, 1.0, 0.2),
    "all": (1.5, 6, 0.9, 0.12),
    "none": (0.7, 0, 1.0, 0.0),
    "hot": (2.0, 0, 1.0, 0.0),
}
"""Temperature, top-k, top-p and min-p."""


def samples(temperature, limits=None, *, logits=LOGITS, seeds=INDICES, positions=INDICES * 0 + 7, sample=None):
    """`COUNT` tokens that are sampled from one row of logits, by default each with its own seed."""
    if limits is not None:
        limits = Limits(*(column.expand(COUNT).contiguous() for column in limits[:3]), limits.max_ranked)
    temperatures = torch.full((COUNT,), temperature, dtype=torch.float64)
    rows = torch.tensor(logits, dtype=torch.float32).expand(COUNT, -1)
    return np.asarray((sample or sampling.sample_tokens)(rows, temperatures, seeds, positions, limits))


def fits(settings, *, logits=LOGITS, **how):
    """Whether samples could come from the truncated softmax, by a chi-square test at one in a million."""
    temperature, *limits = settings
    tokens = samples(how.pop("temperature", temperature), limits_of([limits]), logits=logits, **how)
    expected, observed = naive.distribution(logits, *settings), np.bincount(tokens, minlength=len(logits))
    possible = expected > 0
    if observed[~possible].any():
        return False
    return bool(chisquare(observed[possible], expected[possible] * COUNT).pvalue > 1e-6)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_samples_follow_the_truncated_softmax_over_seeds(settings):
    assert fits(settings)


def test_samples_follow_the_softmax_over_positions_and_in_large_vocabularies():
    assert fits(SETTINGS["none"], seeds=INDICES * 0 + 3, positions=INDICES)
    assert fits((1.0, 0, 1.0, 0.0), logits=[0.0] * 300 + [3.0] * 5)


def sampled_slowly(logits, temperatures, seeds, positions, limits, noise=gumbel_noise):
    scores = truncate(logits / temperatures.to(logits)[:, None], limits)
    return (scores + noise(seeds, positions, logits.shape[1])).argmax(1)


def noise_before_temperature(logits, temperatures, seeds, positions, limits):
    noise = gumbel_noise(seeds, positions, logits.shape[1])
    temperature = temperatures.to(logits)[:, None]
    return (truncate(logits / temperature, limits) + noise / temperature).argmax(1)


UNIFORM = partial(sampled_slowly, noise=lambda *key: torch.exp(-torch.exp(-gumbel_noise(*key))))


def lowest_of(kept, scores):
    """The lowest score of the tokens that a fault keeps."""
    return scores.masked_fill(~kept, float("inf")).amin(dim=-1)


def crossing_token_dropped(logits, temperatures, limits):
    """Planted fault: top-p drops the token that reaches the share."""
    best = (logits / temperatures.float()[:, None]).sort(dim=-1, descending=True).values
    kept = torch.softmax(best, dim=-1).cumsum(dim=-1) <= limits.top_p.float()[:, None]
    kept[:, 0] = True
    return lowest_of(kept, best)


LOWEST_SCORES = sampling.lowest_scores


def one_too_many(logits, temperatures, limits):
    return LOWEST_SCORES(logits, temperatures, limits._replace(top_k=limits.top_k + 1))


def min_p_of_one(logits, temperatures, limits):
    """Planted fault: min-p is an absolute probability instead of a fraction of the largest one."""
    scores = logits / temperatures.float()[:, None]
    return lowest_of(torch.softmax(scores, dim=-1) >= limits.min_p.float()[:, None], scores)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        ("none", {"temperature": 0.8}),
        ("none", {"seeds": INDICES * 0 + 1}),
        ("none", {"sample": UNIFORM}),
        ("none", {"sample": noise_before_temperature}),
        ("all", {"sample": noise_before_temperature}),
        ("top_p", crossing_token_dropped),
        ("top_k", one_too_many),
        ("min_p", min_p_of_one),
        ("top_p", lambda logits, *_: torch.full((len(logits),), float("-inf"))),
    ],
)
def test_planted_faults_are_caught(monkeypatch, case, fault):
    """Faults of the arguments, of sampling as a whole, and of truncation."""
    if isinstance(fault, dict):
        assert fits(SETTINGS[case], sample=sampled_slowly)
        assert not fits(SETTINGS[case], **fault)
    else:
        monkeypatch.setattr(sampling, "lowest_scores", fault)
        assert not fits(SETTINGS[case])


def test_top_p_keeps_the_token_that_has_the_whole_share_and_with_one_all_tokens_despite_rounding():
    for scores, setting, kept in (([5.0, 0, 1], (0, 1e-12, 0.0), [0]), ([100.0, 0, -100], (3, 1.0, 0.0), [0, 1, 2])):
        assert truncate(torch.tensor([scores]), limits_of([setting]))[0].isfinite().nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("settings", [(3, 1.0, 0.0), (0, 0.5, 0.0), (3, 0.5, 0.1)])
def test_a_row_of_nan_does_not_affect_the_others(settings):
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    limits = limits_of([settings] * 2)
    alone = truncate(scores[1:], limits_of([settings]))
    scores[0] = float("nan")
    assert truncate(scores, limits)[1:].equal(alone)


def of_requests(index):
    """Seeds of the sample with an index of requests with neighboring seeds."""
    return {"seeds": torch.tensor([sample_seed(seed, index) for seed in range(COUNT)])}


@pytest.mark.parametrize(
    "pair",
    [
        (dict, lambda: {"seeds": INDICES + 1}),
        (dict, lambda: {"positions": INDICES * 0 + 8}),
        (partial(of_requests, 1), partial(of_requests, 2)),
    ],
    ids=["seeds", "positions", "samples of a request"],
)
def test_neighboring_seeds_positions_and_samples_are_independent(pair):
    logits = LOGITS[:5]
    left, right = (samples(1.0, logits=logits, **each()) for each in pair)
    probabilities = naive.distribution(logits, 1.0)
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
