"""Accepting drafts that a drafter drew from a distribution of its own, so that outputs follow the target's.

Speculative sampling (Leviathan et al., 2023; Chen et al., 2023) and its extension to trees whose candidates were drawn
without replacement (SpecInfer, Miao et al., 2024; Sequoia, Chen et al., 2024). `p` is the target's distribution, with
temperature, penalties and truncation in it, `q` the drafter's. Random numbers are keyed by seed and position; a drafter
must draw with those of `Stream.DRAFT`, which are independent of the ones that decide here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling.noise import Stream, gumbel_noise, stream_seeds, uniforms

ROOT = -1
"""Parent of a draft token that follows the context directly."""
PADDING = -2
"""Parent of no draft token: what fills up a shorter draft."""


class Verdict(NamedTuple):
    """What became of B drafts of n tokens."""

    kept: Tensor
    """bool [B, n]: the accepted tokens, which are one path from the context on."""
    tokens: Tensor
    """int64 [B]: the target's own token behind them."""


def verify_path(draft: Tensor, lengths: Tensor, p: Tensor, q: Tensor, seeds: Tensor, positions: Tensor) -> Verdict:
    """Verify drafts of one token after the other.

    draft: int64 [B, k], of which `lengths`, int64 [B], count. p: float [B, k + 1, V], behind the context and behind
    each draft token. q: float [B, k, V], which each draft token was drawn from. seeds: int64 [B]. positions: int64 [B],
    of the first draft token.
    """
    batch, size = draft.shape
    places = torch.arange(size, device=draft.device)
    at = (positions[:, None] + places).flatten()
    accept_seeds = stream_seeds(seeds, Stream.ACCEPT)[:, None].expand(batch, size)
    chance = uniforms(accept_seeds.flatten(), at, torch.zeros_like(at)).view(batch, size)
    p_drafted, q_drafted = (odds[:, :size].gather(2, draft[:, :, None])[:, :, 0] for odds in (p, q))
    # Accept with probability min(1, p / q).
    agrees = (chance * q_drafted < p_drafted) & (places < lengths[:, None])
    kept = agrees.cumprod(dim=1).bool()
    accepted = kept.sum(dim=1)
    rows = torch.arange(batch, device=draft.device)
    behind = p[rows, accepted]
    if size:
        refused = q[rows, accepted.clamp(max=size - 1)]
        behind = torch.where((accepted < lengths)[:, None], _residual(behind, refused), behind)
    return Verdict(kept, _drawn(behind, seeds, positions + accepted))


def verify_tree(draft: Tensor, parents: Tensor, p: Tensor, q: Tensor, seeds: Tensor, positions: Tensor) -> Verdict:
    """Verify draft trees. The children of a token were drawn without replacement, in the order in which they stand.

    draft: int64 [B, n]. parents: int64 [B, n], indices within the draft, `ROOT` or `PADDING`; parents stand before
    their children. p: float [B, n + 1, V], behind the context and behind each draft token. q: float [B, n + 1, V], the
    same of the drafter; rows without children do not matter. seeds, positions: as for `verify_path`.
    """
    accept_seeds = stream_seeds(seeds, Stream.ACCEPT)
    kept = torch.zeros_like(draft, dtype=torch.bool)
    at = torch.full_like(positions, ROOT)
    place, rank = positions.clone(), torch.zeros_like(positions)
    target, drafter = p[:, 0], q[:, 0]
    for node in range(draft.shape[1]):
        token = draft[:, node, None]
        p_drafted, q_drafted = target.gather(1, token)[:, 0], drafter.gather(1, token)[:, 0]
        agrees = uniforms(accept_seeds, place, rank) * q_drafted < p_drafted
        is_tried = parents[:, node] == at
        taken, refused = is_tried & agrees, is_tried & ~agrees
        # The next candidate is held against what this one has left over, drawn from what the drafter had left.
        left = _residual(target, drafter)
        not_drawn = _normalised(drafter.scatter(1, token, 0))
        target = _chosen(taken, p[:, node + 1], _chosen(refused, left, target))
        drafter = _chosen(taken, q[:, node + 1], _chosen(refused, not_drawn, drafter))
        kept[:, node] = taken
        at = torch.where(taken, node, at)
        place = place + taken
        rank = torch.where(taken, 0, rank + refused)
    return Verdict(kept, _drawn(target, seeds, place))


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """What a refused candidate leaves of the target's distribution, [B, V]: max(p - q, 0), normalised."""
    left = _normalised((p - q).clamp(min=0))
    # Where rounding refuses a candidate although p = q, nothing is left.
    return _chosen(left.sum(dim=1) > 0, left, p)


def _normalised(weights: Tensor) -> Tensor:
    total = weights.sum(dim=1, keepdim=True)
    return weights / torch.where(total > 0, total, 1)


def _chosen(condition: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.where(condition[:, None], left, right)


def _drawn(odds: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """A token from each distribution, [B, V], with the noise of plain decoding."""
    return (odds.log() + gumbel_noise(seeds, positions, odds.shape[1])).argmax(dim=1)
