"""Rejection sampling: equal to its slow twin, with outputs distributed like the target's.

The statistical tests draft from a table of distributions, verify, and complete every output to three tokens by plain
sampling. The texts must follow the target's distribution, and must not with a planted fault.
"""

import inspect
import types
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.noise import Stream, gumbel_noise, stream_seeds, uniforms
from engine.speculation import rejection
from engine.speculation.rejection import DETERMINISTIC, SampledPaths
from tests.engine.sampled_outputs import SIGNIFICANCE, p_value

VOCAB = 4
LENGTH = 3
COUNT = 6_000
DRAFTED = 2
"""Number of tokens of each draft."""
POSITION = 5


def distributions(rng, shape, zeros=0.0):
    weights = rng.gamma(0.5, size=(*shape, VOCAB)) + 1e-3
    weights[rng.random(weights.shape) < zeros] = 0
    weights[..., 0] += 1e-2
    return weights / weights.sum(-1, keepdims=True)


def table(probabilities, texts):
    """Rows of a table over prefixes, [1 + V + V**2 + V**3, V], for texts [B, n]."""
    rows = torch.zeros(len(texts), dtype=torch.int64)
    for column in texts.T:
        rows = rows * VOCAB + column + 1
    return probabilities[rows]


class Drafts:
    """Paths for many seeds, and the distributions that they are verified against."""

    def __init__(self, target, drafter, *, noise=Stream.DRAFT, ranked=()):
        """ranked: places of tokens that are the likeliest ones, not sampled. noise: None for the target's."""
        self.target, seeds = target, torch.arange(COUNT) * 7919
        noise_seeds = seeds if noise is None else stream_seeds(seeds, noise)
        text, p, q = torch.empty(COUNT, 0, dtype=torch.int64), [table(target, torch.empty(COUNT, 0))], []
        for place in range(DRAFTED):
            q.append(table(drafter, text))
            noise_here = gumbel_noise(noise_seeds, torch.full((COUNT,), POSITION + place), VOCAB)
            chosen = (q[-1].log() + (0 if place in ranked else noise_here)).argmax(dim=1)
            text = torch.cat((text, chosen[:, None]), dim=1)
            p.append(table(target, text))
        self.tokens, self.p, self.q = text, torch.stack(p, 1).flatten(0, 1), torch.stack(q, 1).flatten(0, 1)
        q_rows = np.where(
            np.isin(np.arange(DRAFTED), ranked), DETERMINISTIC, np.arange(COUNT * DRAFTED).reshape(COUNT, -1)
        )
        self.paths = SampledPaths(
            text.flatten().numpy(), q_rows.ravel(), np.full(COUNT, DRAFTED), seeds.numpy(), np.full(COUNT, POSITION)
        )

    def fit(self, verifier=rejection):
        """Whether outputs, completed to `LENGTH` tokens, could be the target's."""
        accepted, tokens = verifier.verify_by_rejection(self.paths, self.p, self.q)
        text = torch.zeros(COUNT, LENGTH + 1, dtype=torch.int64)
        text[:, :DRAFTED] = self.tokens
        text[torch.arange(COUNT), torch.from_numpy(accepted)] = torch.from_numpy(tokens)
        generator = torch.Generator().manual_seed(1)
        for place in range(LENGTH):
            missing = torch.from_numpy(accepted < place)
            if missing.any():
                probabilities = table(self.target, text[missing, :place])
                text[missing, place] = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        expected = torch.ones(1, dtype=torch.float64)
        prefixes = torch.empty(1, 0, dtype=torch.int64)
        for _ in range(LENGTH):
            expected = (expected[:, None] * table(self.target, prefixes)).flatten()
            prefixes = torch.cat(
                [prefixes.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(prefixes))[:, None]], dim=1
            )
        cells = (text[:, :LENGTH] * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
        observed = np.bincount(cells, minlength=VOCAB**LENGTH)
        expected = COUNT * expected.numpy()
        return not observed[expected == 0].any() and p_value(observed, expected) > SIGNIFICANCE


def tables(kind):
    """A target and a drafter over all prefixes of up to three tokens."""
    rng = np.random.default_rng(5)
    prefixes = (sum(VOCAB**n for n in range(LENGTH + 1)),)
    target = distributions(rng, prefixes)
    if kind == "good":
        drafter = 0.7 * target + 0.3 * distributions(rng, prefixes)
    elif kind == "bad":
        drafter = distributions(rng, prefixes)
    elif kind == "equal":
        drafter = target.copy()
    elif kind == "adversarial":  # most likely where the target is least likely
        drafter = 1 / target
    elif kind == "truncated":  # proposes tokens that the target never samples
        target = distributions(rng, prefixes, zeros=0.4)
        drafter = distributions(rng, prefixes)
    elif kind == "shifted":
        target[:], drafter = [0.1, 0.45, 0.35, 0.1], np.tile([0.4, 0.4, 0.1, 0.1], (len(target), 1))
    drafter /= drafter.sum(-1, keepdims=True)
    return torch.from_numpy(target), torch.from_numpy(drafter)


@cache
def drafts_of(kind, ranked=()):
    return Drafts(*tables(kind), ranked=ranked)


@pytest.mark.parametrize("kind", ["good", "bad", "equal", "adversarial", "truncated", "shifted"])
def test_outputs_have_the_targets_distribution(kind):
    assert drafts_of(kind).fit()


@pytest.mark.parametrize("ranked", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("kind", ["good", "bad"])
def test_deterministic_candidates(kind, ranked):
    """Deterministic candidates alone, and before and after sampled tokens."""
    assert drafts_of(kind, ranked).fit()


def planted(old, new):
    """The module with a part of its source replaced."""
    source = inspect.getsource(rejection)
    assert source.count(old) == 1
    module = types.ModuleType("planted")
    exec(compile(source.replace(old, new), "planted", "exec"), vars(module))
    return module


FAULTS = {
    "accepts with p": ("thresholds * drafter < target", "thresholds < target"),
    "accepts with q / p": ("thresholds * drafter < target", "thresholds * target < drafter"),
    "residual from p": ("(p - drafter).clamp(min=0)", "p.clone()"),
    "residual from |p - q|": ("(p - drafter).clamp(min=0)", "(p - drafter).abs()"),
    "own token from p": ("accepted < paths.lengths", "accepted < 0"),
    "own token from the row before": ("starts + np.arange(len(starts)) + accepted", "starts + np.arange(len(starts))"),
    "probability from another row of q": ("q[q_rows.clamp(min=0), tokens]", "q[(q_rows - 1).clamp(min=0), tokens]"),
    "residual with another row of q": ("q[q_rows.clamp(min=0)].to(p)", "q[q_rows * 0].to(p)"),
    "one number for all seeds": ("stream_seeds(seeds, Stream.ACCEPT)", "stream_seeds(0 * seeds, Stream.ACCEPT)"),
    "one number for all depths": ("paths.positions[owner] + places", "paths.positions[owner]"),
    "the drafter's noise": ("stream_seeds(seeds, Stream.ACCEPT)", "stream_seeds(seeds, Stream.DRAFT)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault):
    verifier = planted(*FAULTS[fault])
    assert not all(drafts_of(kind).fit(verifier) for kind in ("shifted", "bad", "adversarial"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.zeros_like(p).scatter(1, tokens[:, None], 1)", "torch.zeros_like(p)"),
        ("torch.where(q_rows == DETERMINISTIC, drafter,", "torch.where(q_rows == -2, drafter,"),
    ],
    ids=["stays in p", "accepted as if sampled"],
)
def test_planted_faults_of_deterministic_candidates_are_caught(old, new):
    assert not drafts_of("good", (0,)).fit(planted(old, new))


def test_drafts_with_the_targets_noise_are_caught():
    assert not Drafts(*tables("shifted"), noise=None).fit()


@st.composite
def problems(draw):
    """A path, whether each token was sampled, its distributions, a seed and a position."""
    size = draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    p, q = (distributions(rng, (size + 1,), zeros=0.3) for _ in range(2))
    if draw(st.booleans()):
        q = p.copy()
    sampled = [draw(st.booleans()) for _ in range(size)]
    tokens = [int(rng.choice(VOCAB, p=q[place]) if sampled[place] else rng.integers(VOCAB)) for place in range(size)]
    return tokens, sampled, p, q, draw(st.integers(-1000, 1000)), draw(st.integers(0, 1000))


def naive(tokens, sampled, p, q, seed, position):
    """One token after the other: the number of accepted ones, and the target's token after them."""
    seeds = torch.tensor([seed])
    for place in range(len(tokens) + 1):
        at, weights = torch.tensor([position + place]), p[place]
        if place < len(tokens):
            token = tokens[place]
            drafter = q[place] if sampled[place] else np.eye(VOCAB)[token]
            if float(uniforms(stream_seeds(seeds, Stream.ACCEPT), at, at * 0)) * drafter[token] < p[place, token]:
                continue
            rest = np.maximum(p[place] - drafter, 0)
            weights = rest if rest.any() else weights
        with np.errstate(divide="ignore"):
            return place, int((np.log(weights) + gumbel_noise(seeds, at, VOCAB)[0].numpy()).argmax())
    raise AssertionError


@settings(max_examples=150)
@given(st.lists(problems(), min_size=1, max_size=4))
def test_drafts_are_verified_like_by_the_slow_twin(batch):
    tokens, sampled = ([each for problem in batch for each in problem[field]] for field in (0, 1))
    sizes, seeds, positions = (
        np.array(column) for column in zip(*((len(t), s, at) for t, *_, s, at in batch), strict=True)
    )
    q_rows = np.where(
        np.array(sampled, bool), np.arange(len(tokens)) + np.arange(len(batch)).repeat(sizes), DETERMINISTIC
    )
    p, q = (torch.from_numpy(np.concatenate([problem[field] for problem in batch])) for field in (2, 3))
    paths = SampledPaths(np.array(tokens, np.int64), q_rows, sizes, seeds, positions)
    found = rejection.verify_by_rejection(paths, p, q)
    assert list(zip(*(each.tolist() for each in found), strict=True)) == [naive(*problem) for problem in batch]
