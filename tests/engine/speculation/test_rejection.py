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
from scipy.stats import chisquare

from engine.sampling.noise import Stream, gumbel_noise, stream_seeds, uniforms
from engine.speculation import rejection
from engine.speculation.rejection import DETERMINISTIC, SampledDraft
from ssd.types import ROOT
from tests.engine.speculation import naive_rejection as naive

VOCAB = 4
LENGTH = 3
COUNT = 6_000
PATH = [ROOT, 0]
TREE = [ROOT, ROOT, 0, 0, 1, ROOT]
"""Three candidates after the context, two after the first of them, one after the second."""
POSITION = 5


def distributions(rng, shape, zeros=0.0):
    weights = rng.gamma(0.5, size=(*shape, VOCAB)) + 1e-3
    weights[rng.random(weights.shape) < zeros] = 0
    weights[..., 0] += 1e-2
    return weights / weights.sum(-1, keepdims=True)


def sampled_without_replacement(probabilities, noise, count):
    """The `count` tokens of the largest perturbed log-probabilities: Gumbel's trick for several samples."""
    return (probabilities.log() + noise).argsort(dim=1, descending=True)[:, :count]


def sampled_with_replacement(probabilities, noise, count):
    generator = torch.Generator().manual_seed(2)
    return torch.multinomial(probabilities, count, replacement=True, generator=generator)


def table(probabilities, texts):
    """Rows of a table over prefixes, [1 + V + V**2 + V**3, V], for texts [B, n]."""
    rows = torch.zeros(len(texts), dtype=torch.int64)
    for column in texts.T:
        rows = rows * VOCAB + column + 1
    return probabilities[rows]


class Drafts:
    """Drafts of one shape for many seeds, and the distributions that they are verified against."""

    def __init__(self, target, drafter, parents, *, sample=sampled_without_replacement, noise=Stream.DRAFT, ranked=()):
        """ranked: nodes that are chosen by rank, not sampled."""
        self.target = target
        self.seeds = torch.arange(COUNT) * 7919
        seeds = self.seeds if noise is None else stream_seeds(self.seeds, noise)
        texts = {ROOT: torch.empty(COUNT, 0, dtype=torch.int64)}
        tokens = torch.empty(COUNT, len(parents), dtype=torch.int64)
        for parent in dict.fromkeys(parents):
            children = [node for node, other in enumerate(parents) if other == parent]
            positions = torch.full((COUNT,), POSITION + texts[parent].shape[1])
            q = table(drafter, texts[parent])
            sampled = [child for child in children if child not in ranked]
            picked = sample(q, gumbel_noise(seeds, positions, VOCAB), len(sampled))
            for rank, child in enumerate(children):
                by_rank = q.argsort(dim=1, descending=True)[:, rank]
                tokens[:, child] = by_rank if child in ranked else picked[:, sampled.index(child)]
                texts[child] = torch.cat([texts[parent], tokens[:, child, None]], dim=1)
        rows = [texts[node] for node in range(-1, len(parents))]
        self.tokens = tokens
        self.p, self.q = (
            torch.stack([table(each, text) for text in rows], 1).flatten(0, 1) for each in (target, drafter)
        )
        own, width = np.array(parents, np.int32), len(parents) + 1
        is_ranked = np.isin(np.arange(len(parents)), ranked)
        self.drafts = []
        for index, seed in enumerate(self.seeds.tolist()):
            row = index * width
            q_rows = np.where(is_ranked, DETERMINISTIC, row + 1 + own)
            draft = SampledDraft(tokens[index].numpy().astype(np.uint32), own, q_rows, row, seed, POSITION)
            self.drafts.append(draft)

    def verified(self, verifier=rejection):
        return verifier.verify_by_rejection(self.drafts, self.p, self.q)

    def fits(self, verdicts):
        """Whether outputs, completed to `LENGTH` tokens, could be the target's: chi-square at one in a million."""
        text = torch.zeros(COUNT, LENGTH + 1, dtype=torch.int64)
        accepted = torch.tensor([len(verdict.kept) for verdict in verdicts])
        for row, verdict in enumerate(verdicts):
            text[row, : len(verdict.kept)] = self.tokens[row, verdict.kept]
        text[torch.arange(COUNT), accepted] = torch.tensor([verdict.token for verdict in verdicts])
        generator = torch.Generator().manual_seed(1)
        for place in range(LENGTH):
            missing = accepted < place
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
        possible = expected.numpy() > 0
        if observed[~possible].any():
            return False
        return chisquare(observed[possible], expected.numpy()[possible] * COUNT).pvalue > 1e-6


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
    elif kind == "second":  # the second candidate matters after a rejected first one
        target[:], drafter = [0.1, 0.45, 0.35, 0.1], np.tile([0.4, 0.4, 0.1, 0.1], (len(target), 1))
    elif kind == "third":  # the first two candidates are nearly always rejected
        target[:], drafter = [0.02, 0.02, 0.5, 0.46], np.tile([0.45, 0.4, 0.14, 0.01], (len(target), 1))
    drafter /= drafter.sum(-1, keepdims=True)
    return torch.from_numpy(target), torch.from_numpy(drafter)


@cache
def tree_of(kind):
    return Drafts(*tables(kind), TREE)


TABLES = ["good", "bad", "equal", "adversarial", "truncated", "second", "third"]
REVEALING = ["second", "third", "bad", "adversarial"]


@pytest.mark.parametrize("shape", [PATH, TREE], ids=["path", "tree"])
@pytest.mark.parametrize("kind", TABLES)
def test_outputs_have_the_targets_distribution(kind, shape):
    drafts = tree_of(kind) if shape is TREE else Drafts(*tables(kind), PATH)
    verdicts = drafts.verified()
    assert drafts.fits(verdicts)
    if kind == "equal" and shape is PATH:
        assert all(len(verdict.kept) == len(PATH) for verdict in verdicts)


@pytest.mark.parametrize("ranked", [range(len(TREE)), [0, 2], [1, 3, 5]], ids=["all", "first", "second"])
@pytest.mark.parametrize("kind", ["good", "second"])
def test_deterministic_candidates(kind, ranked):
    """Deterministic candidates alone, and before and after sampled siblings; some are the same token."""
    drafts = Drafts(*tables(kind), TREE, ranked=ranked)
    assert drafts.fits(drafts.verified())


def test_a_second_candidate_raises_acceptance():
    one, three = Drafts(*tables("adversarial"), [ROOT]), tree_of("adversarial")
    accepted = [sum(len(verdict.kept) > 0 for verdict in drafts.verified()) for drafts in (one, three)]
    assert accepted[1] > 1.2 * accepted[0]


def planted(old, new):
    """The module with a part of its source replaced."""
    source = inspect.getsource(rejection)
    assert source.count(old) == 1
    module = types.ModuleType("planted")
    exec(compile(source.replace(old, new), "planted", "exec"), vars(module))
    return module


ACCEPTS = "self._thresholds[node] * self._q[node] * self.q_scale < target"
FAULTS = {
    "accepts with p": (ACCEPTS, "self._thresholds[node] < target"),
    "accepts with q / p": (ACCEPTS, "self._thresholds[node] * target < self._q[node] * self.q_scale"),
    "residual from p": ("(target - drafter).clamp(min=0)", "target.clone()"),
    "residual from |p - q|": ("(target - drafter).clamp(min=0)", "(target - drafter).abs()"),
    "residual not normalized": ("rest / torch.where(total > 0, total, 1)", "rest"),
    "residual of the first rejection": ("torch.where(is_first[:, None], target, residual)", "target"),
    "p stays for the next candidate": ("self.residual if self.rejections else self._p[node]", "self._p[node]"),
    "q stays for the next candidate": ("(1 / left if left > 0 else 0.0)", "1.0"),
    "own token from p": ("[walk.rejections > 0 for", "[False for"),
    "own token from the row before": ("+ 1 + (self.path[-1] if self.path else ROOT)", "+ len(self.path[1:])"),
    "probability from another row of q": ("q[q_rows.clamp(min=0), tokens]", "q[(q_rows - 1).clamp(min=0), tokens]"),
    "residual with another row of q": ("max(0, int(walk.draft.q_rows[walk.rejected]))", "0"),
    "one number for all siblings": ("ranks.append(children[parent])", "ranks.append(0)"),
    "one number for all depths": ("draft.position + np.array(depths", "draft.position + 0 * np.array(depths"),
    "the drafter's noise": ("stream_seeds(seeds, Stream.ACCEPT)", "stream_seeds(seeds, Stream.DRAFT)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault):
    verifier = planted(*FAULTS[fault])
    assert not all(drafts.fits(drafts.verified(verifier)) for kind in REVEALING for drafts in [tree_of(kind)])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.zeros_like(target).scatter(1, tokens, 1)", "torch.zeros_like(target)"),
        ("torch.where(q_rows == DETERMINISTIC, drafter,", "torch.where(q_rows == -2, drafter,"),
    ],
    ids=["stays in p", "accepted as if sampled"],
)
def test_planted_faults_of_deterministic_candidates_are_caught(old, new):
    drafts = Drafts(*tables("second"), TREE, ranked=[0, 2])
    assert not drafts.fits(drafts.verified(planted(old, new)))


@pytest.mark.parametrize(
    ("kind", "shape", "how"),
    [("second", PATH, {"noise": None}), ("bad", TREE, {"sample": sampled_with_replacement})],
    ids=["the target's noise", "with replacement"],
)
def test_drafters_that_sample_wrongly_are_caught(kind, shape, how):
    drafts = Drafts(*tables(kind), shape, **how)
    assert not drafts.fits(drafts.verified())


@st.composite
def problems(draw):
    """A tree, its distributions, candidates, a seed and a position."""
    size = draw(st.integers(0, 7))
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(size)]
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    p, q = (distributions(rng, (size + 1,), zeros=0.3) for _ in range(2))
    if draw(st.booleans()):
        q = p.copy()
    tokens, sampled, left = [], [], q.copy()
    for parent in parents:
        sampled.append(draw(st.booleans()) and left[parent + 1].sum() > 1e-9)
        if sampled[-1]:
            tokens.append(int(rng.choice(VOCAB, p=left[parent + 1] / left[parent + 1].sum())))
            left[parent + 1, tokens[-1]] = 0
        else:
            tokens.append(int(rng.integers(VOCAB)))
    return parents, tokens, sampled, p, q, draw(st.integers(-1000, 1000)), draw(st.integers(0, 1000))


def randomness(seed, position):
    seeds = torch.tensor([seed])

    def uniform(depth, rank):
        at = torch.tensor([position + depth])
        return float(uniforms(stream_seeds(seeds, Stream.ACCEPT), at, torch.tensor([rank]))[0])

    return uniform, lambda depth: gumbel_noise(seeds, torch.tensor([position + depth]), VOCAB)[0].tolist()


@settings(max_examples=150)
@given(st.lists(problems(), min_size=1, max_size=4))
def test_drafts_are_verified_like_by_the_slow_twin(batch):
    drafts, row = [], 0
    for parents, tokens, sampled, _, _, seed, position in batch:
        own = np.array(parents, np.int32)
        q_rows = np.where(np.array(sampled, bool), row + 1 + own, DETERMINISTIC)
        drafts.append(SampledDraft(np.array(tokens, np.uint32), own, q_rows, row, seed, position))
        row += 1 + len(parents)
    p, q = (torch.from_numpy(np.concatenate([problem[field] for problem in batch])) for field in (3, 4))
    verdicts = rejection.verify_by_rejection(drafts, p, q)
    for verdict, (parents, tokens, sampled, own_p, own_q, seed, position) in zip(verdicts, batch, strict=True):
        path, token = naive.verify_tree(
            tokens, parents, sampled, own_p.tolist(), own_q.tolist(), *randomness(seed, position)
        )
        assert verdict.kept.tolist() == path
        assert verdict.token == token
