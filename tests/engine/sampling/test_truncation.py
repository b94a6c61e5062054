"""Compare the tokens that min-p, top-k and top-p keep with loops, and test the frequencies of samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from engine.sampling import noise as sampling
from engine.sampling.noise import Limits, sample_tokens, truncate
from tests.engine import naive_sampling as naive

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
SETTINGS = {
    "top_k": (0.8, 3, 1.0, 0.0),
    "top_p": (1.3, 0, 0.7, 0.0),
    "min_p": (1.0, 0, 1.0, 0.2),
    "all": (1.5, 6, 0.9, 0.12),
    "none": (0.7, 0, 1.0, 0.0),
}


def fits(temperature, top_k, top_p, min_p):
    """Whether `COUNT` samples, each with its own seed, could come from the truncated softmax: chi-square, 1 in 10^6."""
    *columns, most = limits_of([(top_k, top_p, min_p)])
    limits = Limits(*(column.expand(COUNT).contiguous() for column in columns), most)
    temperatures = torch.full((COUNT,), temperature, dtype=torch.float64)
    logits, positions = torch.tensor(LOGITS).expand(COUNT, -1), torch.full((COUNT,), 5)
    tokens = sample_tokens(logits, temperatures, torch.arange(COUNT), positions, limits)
    expected = naive.distribution(LOGITS, temperature, top_k, top_p, min_p)
    observed = np.bincount(tokens, minlength=len(LOGITS))
    possible = expected > 0
    if observed[~possible].any():
        return False
    return bool(chisquare(observed[possible], expected[possible] * COUNT).pvalue > 1e-6)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_samples_follow_the_truncated_softmax(settings):
    assert fits(*settings)


def noise_before_temperature(logits, temperatures, seeds, positions, limits):
    noise = sampling.gumbel_noise(seeds, positions, logits.shape[1])
    temperature = temperatures.to(logits)[:, None]
    return (truncate(logits / temperature, limits) + noise / temperature).argmax(dim=-1).numpy()


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
    ("case", "place", "fault"),
    [
        ("all", "sample_tokens", noise_before_temperature),
        ("none", "sample_tokens", noise_before_temperature),
        ("top_p", "lowest_scores", crossing_token_dropped),
        ("top_k", "lowest_scores", one_too_many),
        ("min_p", "lowest_scores", min_p_of_one),
        ("top_p", "lowest_scores", lambda logits, *_: torch.full((len(logits),), float("-inf"))),
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
    assert truncate(scores, limits_of([(0, 1e-12, 0.0)])).isfinite().tolist() == [[True, False, False]]


def test_top_p_of_one_keeps_all_tokens_despite_rounding():
    scores = torch.tensor([[100.0, 0.0, -100.0]])
    assert truncate(scores, limits_of([(3, 1.0, 0.0)])).isfinite().all()


@pytest.mark.parametrize("settings", [(3, 1.0, 0.0), (0, 0.5, 0.0), (3, 0.5, 0.1)])
def test_a_row_of_nan_does_not_affect_the_others(settings):
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    limits = limits_of([settings] * 2)
    alone = truncate(scores[1:], limits_of([settings]))
    scores[0] = float("nan")
    assert truncate(scores, limits)[1:].equal(alone)
