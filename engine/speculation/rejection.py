"""Rejection sampling: verify sampled drafts so that outputs follow the target's distribution.

Speculative sampling (Leviathan et al., 2023; Chen et al., 2023), and its extension to trees whose siblings were sampled
without replacement (SpecInfer, Miao et al., 2024; Sequoia, Chen et al., 2024). `p` is the target's distribution, with
temperature, penalties and truncation applied; `q` the one that a draft token was sampled from, one-hot for a
deterministic candidate.

At each position the candidates are tried in order. Candidate x is accepted with probability min(1, p(x) / q(x)); after
a rejection p becomes the normalized residual max(p - q, 0), and q is normalized without x. If all are rejected, the
target's token is sampled from the residual. Random numbers are keyed by seed and position: `Stream.ACCEPT` decides on
candidates, and the noise of plain decoding samples the target's token. The drafter must not have used either of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.drafters.drafts import DETERMINISTIC
from engine.executor.transfer import on_device
from engine.sampling.noise import Stream, gumbel_noise, stream_seeds, uniforms
from ssd.types import ROOT


class SampledDraft(NamedTuple):
    """A draft of k tokens to verify, with its rows of `p` and `q`."""

    tokens: np.ndarray
    """uint32 [k]."""
    parents: np.ndarray
    """int32 [k]: indices within the draft, `ROOT` for a child of the context; parents precede their children."""
    q_rows: np.ndarray
    """int32 [k]: the row of `q` that each token was sampled from, `DETERMINISTIC` if it was not."""
    row: int
    """Row of `p` after the context; the row after draft token i is `row + 1 + i`."""
    seed: int
    position: int
    """Position of the first draft token in the text."""


class Verdict(NamedTuple):
    """Result of verifying one draft."""

    kept: np.ndarray
    """int64 [a]: indices of the accepted tokens, a path from the root."""
    token: int
    """The target's token after them."""


def verify_by_rejection(drafts: SequenceOf[SampledDraft], p: Tensor, q: Tensor | None) -> list[Verdict]:
    """Verify drafts. p: float [M, V]. q: float32 [R, V]; None if all candidates are deterministic."""
    q = None if q is None else q.to(p.device)
    walks = [Walk(draft, *trials) for draft, trials in zip(drafts, _trials(drafts, p, q), strict=True)]
    # Residual distributions, in the rows of walks with a rejection at their current position.
    residual = torch.empty(len(walks), p.shape[1], dtype=p.dtype, device=p.device)
    while indices := [index for index, walk in enumerate(walks) if walk.advance()]:
        rejected = [walks[index] for index in indices]
        after = _residuals(rejected, residual[indices], p, q)
        residual[indices] = after
        tokens = torch.tensor([[walk.next_token] for walk in rejected], device=p.device)
        for walk, probability in zip(rejected, after.gather(1, tokens)[:, 0].tolist(), strict=True):
            walk.residual = probability
    return _verdicts(walks, residual, p)


class Walk:
    """Walk through one draft along accepted tokens, on the host."""

    def __init__(self, draft: SampledDraft, p: list[float], q: list[float], thresholds: list[float]) -> None:
        """p, q: probabilities of each draft token before any rejection at its position. thresholds: uniform random
        numbers that decide whether each is accepted.
        """
        self.draft = draft
        self.path: list[int] = []
        """Indices of accepted draft tokens."""
        self.rejections = 0
        """Number of candidates rejected at the current position."""
        self.rejected = ROOT
        """Index of the last rejected candidate."""
        self.q_scale = 1.0
        """Factor that normalizes the last rejected candidate's row of `q` without the candidates rejected before it."""
        self.residual = 0.0
        """Probability of the next candidate in the residual."""
        self._p, self._q, self._thresholds = p, q, thresholds
        self._rejected_mass = 0.0
        """Probability in q of the sampled candidates rejected at the current position."""
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parents.tolist()):
            self._children.setdefault(parent, []).append(node)

    @property
    def p_row(self) -> int:
        """Row of `p` at the current position."""
        return self.draft.row + 1 + (self.path[-1] if self.path else ROOT)

    @property
    def next_token(self) -> int:
        """Token of the next candidate; 0 if there is none."""
        node = self._candidate
        return 0 if node is None else int(self.draft.tokens[node])

    def is_sampled(self, node: int) -> bool:
        """Whether a draft token was sampled."""
        return int(self.draft.q_rows[node]) != DETERMINISTIC

    def advance(self) -> bool:
        """Try candidates until one is rejected or none is left; return whether one was rejected."""
        while (node := self._candidate) is not None:
            left = 1 - self._rejected_mass
            self.q_scale = (1 / left if left > 0 else 0.0) if self.is_sampled(node) else 1.0
            target = self.residual if self.rejections else self._p[node]
            if self._thresholds[node] * self._q[node] * self.q_scale < target:
                self.path.append(node)
                self.rejections, self._rejected_mass = 0, 0.0
                continue
            self.rejected = node
            self.rejections += 1
            self._rejected_mass += self._q[node] if self.is_sampled(node) else 0.0
            return True
        return False

    @property
    def _candidate(self) -> int | None:
        siblings = self._children.get(self.path[-1] if self.path else ROOT, [])
        return siblings[self.rejections] if self.rejections < len(siblings) else None


def _trials(drafts: SequenceOf[SampledDraft], p: Tensor, q: Tensor | None) -> list[list[list[float]]]:
    """Return for each draft, [3, k]: its tokens' probabilities in p, those in q, and their thresholds."""
    columns = [np.concatenate(parts) for parts in zip(*(_columns(draft) for draft in drafts), strict=True)]
    tokens, p_rows, q_rows, seeds, positions, ranks = (on_device(column, p.device) for column in columns)
    target = p[p_rows, tokens].double()
    drafter = torch.ones_like(target)
    if q is not None:
        drafter = torch.where(q_rows == DETERMINISTIC, drafter, q[q_rows.clamp(min=0), tokens].double())
    thresholds = uniforms(stream_seeds(seeds, Stream.ACCEPT), positions, ranks)
    ends = np.cumsum([len(draft.tokens) for draft in drafts])[:-1]
    return [part.tolist() for part in np.split(torch.stack((target, drafter, thresholds)).cpu().numpy(), ends, axis=1)]


def _columns(draft: SampledDraft) -> tuple[np.ndarray, ...]:
    """Return token, row of p, row of q, seed, position and rank among siblings of each draft token, int64 [k] each."""
    depths: list[int] = []
    ranks: list[int] = []
    children = Counter[int]()
    for parent in draft.parents.tolist():
        depths.append(0 if parent == ROOT else depths[parent] + 1)
        ranks.append(children[parent])
        children[parent] += 1
    return (
        draft.tokens.astype(np.int64),
        draft.row + 1 + draft.parents.astype(np.int64),
        draft.q_rows.astype(np.int64),
        np.full(len(ranks), draft.seed, np.int64),
        draft.position + np.array(depths, np.int64),
        np.array(ranks, np.int64),
    )


def _residuals(walks: SequenceOf[Walk], residual: Tensor, p: Tensor, q: Tensor | None) -> Tensor:
    """Return the residuals, [n, V], after the candidates that the walks rejected last.

    residual: [n, V], the previous residuals of walks with an earlier rejection at the same position.
    """
    device = p.device
    target = p[[walk.p_row for walk in walks]]
    is_first = torch.tensor([walk.rejections == 1 for walk in walks], device=device)
    target = torch.where(is_first[:, None], target, residual)
    is_sampled = torch.tensor([walk.is_sampled(walk.rejected) for walk in walks], device=device)
    tokens = torch.tensor([[int(walk.draft.tokens[walk.rejected])] for walk in walks], device=device)
    drafter = torch.zeros_like(target).scatter(1, tokens, 1)
    if q is not None:
        # Candidates rejected before have no probability left in the residual, so they need not be removed from q.
        scales = torch.tensor([[walk.q_scale] for walk in walks], dtype=p.dtype, device=device)
        rows = [max(0, int(walk.draft.q_rows[walk.rejected])) for walk in walks]
        drafter = torch.where(is_sampled[:, None], q[rows].to(p) * scales, drafter)
    rest = (target - drafter).clamp(min=0)
    total = rest.sum(dim=1, keepdim=True)
    # The residual is empty only if a token was rejected that q cannot have produced.
    return torch.where(total > 0, rest / torch.where(total > 0, total, 1), target)


def _verdicts(walks: SequenceOf[Walk], residual: Tensor, p: Tensor) -> list[Verdict]:
    """Sample the target's tokens with the noise of plain decoding."""
    is_residual = torch.tensor([walk.rejections > 0 for walk in walks], device=p.device)
    probabilities = torch.where(is_residual[:, None], residual, p[[walk.p_row for walk in walks]])
    seeds = torch.tensor([walk.draft.seed for walk in walks], device=p.device)
    positions = torch.tensor([walk.draft.position + len(walk.path) for walk in walks], device=p.device)
    tokens = (probabilities.log() + gumbel_noise(seeds, positions, p.shape[1])).argmax(dim=1).tolist()
    return [Verdict(np.array(walk.path, np.int64), token) for walk, token in zip(walks, tokens, strict=True)]
