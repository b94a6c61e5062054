"""Compare the tokens that min-p, top-k and top-p keep with loops, and test the frequencies of samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from engine.sampling import noise as sampling
from engine.sampling.noise import Truncation, sample_tokens, truncate
from tests.engine import naive_sampling as naive

limits = st.tuples(
    st.integers(-1, 15), st.one_of(st.just(1.0), st.floats(1e-9, 1)), st.one_of(st.just(0.0), st.floats(0, 1))
)


def truncation_of(settings):
    top_k, top_p, min_p = zip(*settings, strict=True)
    return Truncation(np.array(top_k), np.array(top_p, np.float64), np.array(min_p, np.float64))


@given(st.data())
def test_kept_tokens_equal_those_of_a_loop(data):
    """Rows with ties and forbidden tokens, each with its own settings, in one batch."""
    size = data.draw(st.integers(1, 12))
    score = st.one_of(st.integers(-16, 16).map(lambda n: n / 4), st.just(float("-inf")))
    row = st.lists(score, min_size=size, max_size=size).filter(lambda row: max(row) > float("-inf"))
    scores = data.draw(st.lists(row, min_size=1, max_size=5))
    settings = data.draw(st.lists(limits, min_size=len(scores), max_size=len(scores)))
    left = truncate(torch.tensor(scores), truncation_of(settings))
    for before, after, setting in zip(scores, left.tolist(), settings, strict=True):
        expected = naive.kept(before, *setting)
        assert {token for token, value in enumerate(after) if value > float("-inf")} == expected
        assert all(after[token] == before[token] for token in expected)


@given(st.lists(limits, min_size=2, max_size=6), st.integers(0, 1000))
def test_a_row_does_not_depend_on_the_other_rows(settings, seed):
    scores = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(settings), 500)).astype(np.float32))
    together = truncate(scores, truncation_of(settings))
    for index in range(len(settings)):
        alone = truncate(scores[index : index + 1], truncation_of(settings[index : index + 1]))
        assert torch.equal(alone[0], together[index])


LOGITS = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 0.2]
COUNT = 100_000
SETTINGS = {
    "top_k": (0.8, 3, 1.0, 0.0),
    "top_p": (1.3, 0, 0.7, 0.0),
    "min_p": (1.0, 0, 1.0, 0.2),
    "all": (1.5, 6, 0.9, 0.12),
    "none": (0.7, 0, 1.0, 0.0),
}


def fits(temperature, top_k, top_p, min_p):
    """Whether `COUNT` samples, each with its own seed, could come from the truncated softmax: chi-square, 1 in 10^6."""
    settings = truncation_of([(top_k, top_p, min_p)]).rows(np.zeros(COUNT, np.int64))
    logits = torch.tensor(LOGITS).expand(COUNT, -1)
    tokens = sample_tokens(logits, np.full(COUNT, temperature), np.arange(COUNT), np.full(COUNT, 5, np.int64), settings)
    expected = naive.distribution(LOGITS, temperature, top_k, top_p, min_p)
    observed = np.bincount(tokens, minlength=len(LOGITS))
    possible = expected > 0
    if observed[~possible].any():
        return False
    return bool(chisquare(observed[possible], expected[possible] * COUNT).pvalue > 1e-6)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_samples_follow_the_truncated_softmax(settings):
    assert fits(*settings)


def noise_before_temperature(logits, temperatures, seeds, positions, settings):
    noise = sampling.gumbel_noise(torch.from_numpy(seeds), torch.from_numpy(positions), logits.shape[1])
    temperature = torch.from_numpy(temperatures).to(logits)[:, None]
    return (truncate(logits / temperature, settings) + noise / temperature).argmax(dim=-1).numpy()


def crossing_token_dropped(scores, settings):
    """Planted fault: top-p drops the token that reaches the share."""
    best = scores.sort(dim=-1, descending=True)
    mass = torch.softmax(best.values, dim=-1).cumsum(dim=-1)
    drop = mass > torch.from_numpy(settings.top_p).float()[:, None]
    drop[:, 0] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(1, best.indices, drop), float("-inf"))


def one_too_many(scores, settings):
    return truncate(scores, Truncation(settings.top_k + 1, settings.top_p, settings.min_p))


def min_p_of_one(scores, settings):
    """Planted fault: min-p is an absolute probability instead of a fraction of the largest one."""
    return scores.masked_fill(
        torch.softmax(scores, dim=-1) < torch.from_numpy(settings.min_p).float()[:, None], float("-inf")
    )


@pytest.mark.parametrize(
    ("case", "place", "fault"),
    [
        ("all", "sample_tokens", noise_before_temperature),
        ("none", "sample_tokens", noise_before_temperature),
        ("top_p", "truncate", crossing_token_dropped),
        ("top_k", "truncate", one_too_many),
        ("min_p", "truncate", min_p_of_one),
        ("top_p", "truncate", lambda scores, _: scores),
    ],
)
def test_planted_faults_are_caught(monkeypatch, case, place, fault):
    if place == "sample_tokens":
        monkeypatch.setitem(globals(), place, fault)
    else:
        monkeypatch.setattr(sampling, place, fault)
    assert not fits(*SETTINGS[case])


def test_a_token_that_has_the_whole_top_p_share_is_kept():
    scores = torch.tensor([[5.0, 0.0, 1.0]])
    assert truncate(scores, truncation_of([(0, 1e-12, 0.0)])).isfinite().tolist() == [[True, False, False]]


def test_top_p_of_one_keeps_all_tokens_despite_rounding():
    scores = torch.tensor([[100.0, 0.0, -100.0]])
    assert truncate(scores, truncation_of([(3, 1.0, 0.0)])).isfinite().all()


@pytest.mark.parametrize("settings", [(3, 1.0, 0.0), (0, 0.5, 0.0), (3, 0.5, 0.1)])
def test_a_row_of_nan_does_not_affect_the_others(settings):
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    limits = truncation_of([settings] * 2)
    alone = truncate(scores[1:], limits.rows(np.array([1])))
    scores[0] = float("nan")
    assert truncate(scores, limits)[1:].equal(alone)
