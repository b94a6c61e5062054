"""Verification against a drafter's own distribution: equal to its slow twin, and statistically without a trace.

The statistical tests draft from a made-up drafter, verify, and complete every output to three tokens by plain sampling.
The texts must be distributed as the target's own.
"""

import inspect
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from engine.sampling.noise import Stream, gumbel_noise, stream_seeds, uniforms
from engine.speculation import rejection
from engine.speculation.rejection import PADDING, ROOT
from tests.engine import naive_rejection as naive

VOCAB = 4
LENGTH = 3
COUNT = 100_000
TREE = [ROOT, ROOT, 0, 0, 1, 1, ROOT, 2]
"""Three candidates behind the context, two behind each of the first two, one further down."""


def distributions(rng, shape, zeros=0.0):
    weights = rng.gamma(0.5, size=(*shape, VOCAB)) + 1e-3
    weights[rng.random(weights.shape) < zeros] = 0
    weights[..., 0] += 1e-2
    return weights / weights.sum(-1, keepdims=True)


def drawn_without_replacement(odds, noise, count):
    """The first `count` tokens by perturbed log-odds: Gumbel's trick for several draws."""
    return (odds.log() + noise).argsort(dim=1, descending=True)[:, :count]


def table(odds, texts):
    """Rows of a table over prefixes, [1 + V + V**2 + V**3, V], for texts [B, n]."""
    rows = torch.zeros(len(texts), dtype=torch.int64)
    for column in texts.T:
        rows = rows * VOCAB + column + 1
    return odds[rows]


class Drafts:
    """Drafts of the same shape for many seeds, and the distributions that they are verified against."""

    def __init__(self, target, drafter, parents, *, draw=drawn_without_replacement, noise=Stream.DRAFT):
        self.target = target
        self.parents = torch.tensor(parents).expand(COUNT, -1)
        self.seeds, self.positions = torch.arange(COUNT) * 7919, torch.full((COUNT,), 5)
        draft_seeds = self.seeds if noise is None else stream_seeds(self.seeds, noise)
        texts = {ROOT: torch.empty(COUNT, 0, dtype=torch.int64)}
        self.draft = torch.empty(COUNT, len(parents), dtype=torch.int64)
        for parent in dict.fromkeys(parents):
            children = [node for node, other in enumerate(parents) if other == parent]
            depth = texts[parent].shape[1]
            # Cousins must be independent of one another.
            own_seeds = draft_seeds + 1_000_003 * (parent + 1)
            picked = draw(
                table(drafter, texts[parent]), gumbel_noise(own_seeds, self.positions + depth, VOCAB), len(children)
            )
            for rank, child in enumerate(children):
                self.draft[:, child] = picked[:, rank]
                texts[child] = torch.cat([texts[parent], picked[:, rank, None]], dim=1)
        rows = [texts[node] for node in range(-1, len(parents))]
        self.p = torch.stack([table(target, text) for text in rows], dim=1)
        self.q = torch.stack([table(drafter, text) for text in rows], dim=1)

    def verified_as_paths(self, verifier):
        size = self.draft.shape[1]
        lengths = torch.full((COUNT,), size)
        return verifier.verify_path(self.draft, lengths, self.p, self.q[:, :-1], self.seeds, self.positions)

    def verified_as_trees(self, verifier):
        return verifier.verify_tree(self.draft, self.parents, self.p, self.q, self.seeds, self.positions)

    def fits(self, verdict):
        """Whether outputs, completed to `LENGTH` tokens, could be the target's: chi-square at one in a million."""
        text = torch.zeros(COUNT, LENGTH + 1, dtype=torch.int64)
        accepted = verdict.kept.sum(dim=1)
        depth = torch.zeros(COUNT, dtype=torch.int64)
        for node in range(self.draft.shape[1]):
            taken = verdict.kept[:, node]
            text[taken, depth[taken]] = self.draft[taken, node]
            depth += taken
        text[torch.arange(COUNT), accepted] = verdict.tokens
        generator = torch.Generator().manual_seed(1)
        for place in range(LENGTH):
            missing = accepted < place
            if missing.any():
                odds = table(self.target, text[missing, :place])
                text[missing, place] = torch.multinomial(odds, 1, generator=generator)[:, 0]
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
    elif kind == "adversarial":  # likes best what the target likes least
        drafter = 1 / target
    elif kind == "truncated":  # tokens that the target never draws, too
        target = distributions(rng, prefixes, zeros=0.4)
        drafter = distributions(rng, prefixes)
    elif kind == "second":  # likes a token that leaves something to decide for the candidate behind it
        target[:], drafter = [0.1, 0.45, 0.35, 0.1], np.tile([0.4, 0.4, 0.1, 0.1], (len(target), 1))
    drafter /= drafter.sum(-1, keepdims=True)
    return torch.from_numpy(target), torch.from_numpy(drafter)


KINDS = ["good", "bad", "equal", "adversarial", "truncated", "second"]
REVEALING = ["good", "bad", "adversarial", "second"]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_paths_follow_the_target(kind):
    drafts = Drafts(*tables(kind), [ROOT, 0])
    verdict = drafts.verified_as_paths(rejection)
    assert drafts.fits(verdict)
    if kind == "equal":
        assert verdict.kept.all()


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_trees_follow_the_target(kind):
    drafts = Drafts(*tables(kind), TREE)
    verdict = drafts.verified_as_trees(rejection)
    assert drafts.fits(verdict)
    # A second candidate must be worth something.
    one = Drafts(*tables(kind), [ROOT, 0, 1]).verified_as_trees(rejection)
    if kind in ("bad", "adversarial"):
        assert verdict.kept[:, [0, 1, 6]].sum() > 1.2 * one.kept[:, 0].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_is_a_tree_without_branches(kind):
    drafts = Drafts(*tables(kind), [ROOT, 0, 1])
    as_path, as_tree = drafts.verified_as_paths(rejection), drafts.verified_as_trees(rejection)
    assert torch.equal(as_path.kept, as_tree.kept)
    assert torch.equal(as_path.tokens, as_tree.tokens)


def planted(old, new):
    """The module with a piece of its source replaced."""
    source = inspect.getsource(rejection)
    assert source.count(old) == 1
    module = types.ModuleType("planted")
    exec(compile(source.replace(old, new), "planted", "exec"), vars(module))
    return module


PATH_FAULTS = {
    "accepts with p": ("(chance * q_drafted < p_drafted)", "(chance < p_drafted)"),
    "accepts with q / p": ("(chance * q_drafted < p_drafted)", "(chance * p_drafted < q_drafted)"),
    "residual from p": ("(p - q).clamp(min=0)", "p.clone()"),
    "residual from |p - q|": ("(p - q).clamp(min=0)", "(p - q).abs()"),
    "bonus from the row before": ("behind = p[rows, accepted]", "behind = p[rows, (accepted - 1).clamp(min=0)]"),
    "bonus from the last row": ("behind = p[rows, accepted]", "behind = p[rows, -1]"),
    "residual of an accepted draft": ("(accepted < lengths)[:, None]", "(accepted <= lengths)[:, None]"),
    "accepts behind a refusal": ("agrees.cumprod(dim=1).bool()", "agrees.flip(1).cummax(1).values.flip(1)"),
    "one chance for all": ("torch.zeros_like(at)).view", "torch.zeros_like(at)).view(batch, size)[:, :1].expand"),
    "the drafter's random numbers": ("stream_seeds(seeds, Stream.ACCEPT)[:, None]", "seeds[:, None]"),
}


@pytest.mark.parametrize("fault", PATH_FAULTS)
def test_planted_faults_of_paths_are_caught(fault):
    verifier = planted(*PATH_FAULTS[fault])
    noise = Stream.DRAFT
    if fault == "the drafter's random numbers":
        # Not the verifier is at fault, but a drafter that draws with the noise of plain decoding.
        verifier, noise = rejection, None
    assert not all(
        drafts.fits(drafts.verified_as_paths(verifier))
        for kind in REVEALING
        for drafts in [Drafts(*tables(kind), [ROOT, 0], noise=noise)]
    )


TREE_FAULTS = {
    "accepts with p": ("* q_drafted < p_drafted\n", "< p_drafted\n"),
    "residual not normalised": ("weights / torch.where(total > 0, total, 1)", "weights"),
    "residual from p": ("(p - q).clamp(min=0)", "p.clone()"),
    "bonus from the parent's row": ("_chosen(taken, p[:, node + 1], _", "_chosen(taken, p[:, node], _"),
    "p stays after a refusal": ("_chosen(refused, left, target)", "target"),
    "q stays after a refusal": ("_chosen(refused, not_drawn, drafter)", "drafter"),
    "one chance for all siblings": ("torch.where(taken, 0, rank + refused)", "rank"),
    "tries nodes of other branches": ("is_tried = parents[:, node] == at", "is_tried = parents[:, node] >= at"),
}


@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_planted_faults_of_trees_are_caught(fault):
    verifier = planted(*TREE_FAULTS[fault])
    assert not all(
        drafts.fits(drafts.verified_as_trees(verifier))
        for kind in REVEALING
        for drafts in [Drafts(*tables(kind), TREE)]
    )


def drawn_with_replacement(odds, noise, count):
    generator = torch.Generator().manual_seed(2)
    return torch.multinomial(odds, count, replacement=True, generator=generator)


def test_candidates_drawn_with_replacement_are_caught():
    assert not all(
        drafts.fits(drafts.verified_as_trees(rejection))
        for kind in REVEALING
        for drafts in [Drafts(*tables(kind), TREE, draw=drawn_with_replacement)]
    )


@st.composite
def problems(draw):
    """A tree, its distributions, tokens that the drafter could have drawn, a seed and a position."""
    size = draw(st.integers(0, 7))
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(size)]
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    p, q = (distributions(rng, (size + 1,), zeros=0.3) for _ in range(2))
    if draw(st.booleans()):
        q = p.copy()
    tokens, left = [], q.copy()
    for parent in parents:
        # Beyond what q can give, candidates are any; both verifiers must bear it.
        odds = left[parent + 1] / left[parent + 1].sum() if left[parent + 1].sum() else None
        tokens.append(int(rng.choice(VOCAB, p=odds)))
        left[parent + 1, tokens[-1]] = 0
    return parents, tokens, p, q, draw(st.integers(-1000, 1000)), draw(st.integers(0, 1000))


def randomness(seed, position):
    seeds = torch.tensor([seed])

    def chance(depth, rank):
        at = torch.tensor([position + depth])
        return float(uniforms(stream_seeds(seeds, Stream.ACCEPT), at, torch.tensor([rank]))[0])

    return chance, lambda depth: gumbel_noise(seeds, torch.tensor([position + depth]), VOCAB)[0].tolist()


@settings(max_examples=150)
@given(st.lists(problems(), min_size=1, max_size=4))
def test_trees_are_verified_as_by_the_slow_twin(batch):
    """Ragged ones, padded."""
    longest = max(len(parents) for parents, *_ in batch)
    draft = torch.zeros(len(batch), longest, dtype=torch.int64)
    padded = torch.full((len(batch), longest), PADDING)
    p = torch.full((len(batch), longest + 1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    q = p.clone()
    for row, (parents, tokens, own_p, own_q, *_) in enumerate(batch):
        size = len(parents)
        draft[row, :size], padded[row, :size] = torch.tensor(tokens), torch.tensor(parents)
        p[row, : size + 1], q[row, : size + 1] = torch.from_numpy(own_p), torch.from_numpy(own_q)
    seeds, positions = (torch.tensor([problem[field] for problem in batch]) for field in (4, 5))
    verdict = rejection.verify_tree(draft, padded, p, q, seeds, positions)
    for row, (parents, tokens, own_p, own_q, seed, position) in enumerate(batch):
        path, token = naive.verify_tree(tokens, parents, own_p.tolist(), own_q.tolist(), *randomness(seed, position))
        assert verdict.kept[row].nonzero()[:, 0].tolist() == path
        assert int(verdict.tokens[row]) == token


@settings(max_examples=150)
@given(st.integers(0, 5), st.integers(0, 1 << 32), st.integers(-1000, 1000), st.data())
def test_paths_are_verified_as_by_the_slow_twin(size, table_seed, seed, data):
    rng = np.random.default_rng(table_seed)
    length = data.draw(st.integers(0, size))
    p, q = distributions(rng, (size + 1,), zeros=0.3), distributions(rng, (size,), zeros=0.3)
    tokens = [int(rng.choice(VOCAB, p=odds)) for odds in q]
    verdict = rejection.verify_path(
        torch.tensor([tokens], dtype=torch.int64).view(1, size),
        torch.tensor([length]),
        torch.from_numpy(p)[None],
        torch.from_numpy(q)[None],
        torch.tensor([seed]),
        torch.tensor([9]),
    )
    kept, token = naive.verify_path(tokens[:length], p.tolist(), q.tolist(), *randomness(seed, 9))
    assert verdict.kept[0].tolist() == [place < len(kept) for place in range(size)]
    assert int(verdict.tokens[0]) == token


def test_without_a_draft_the_token_is_that_of_plain_decoding():
    rng = np.random.default_rng(0)
    p = torch.from_numpy(distributions(rng, (50, 1)))
    nothing = torch.empty(50, 0, dtype=torch.int64)
    seeds, positions = torch.arange(50), torch.arange(50) + 3
    expected = (p[:, 0].log() + gumbel_noise(seeds, positions, VOCAB)).argmax(dim=1)
    for verdict in (
        rejection.verify_path(nothing, torch.zeros(50, dtype=torch.int64), p, p[:, :0], seeds, positions),
        rejection.verify_tree(nothing, nothing, p, p, seeds, positions),
    ):
        assert torch.equal(verdict.tokens, expected)
