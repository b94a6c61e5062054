"""Rejection sampling: verify sampled paths so that outputs follow the target's distribution.

Speculative sampling (Leviathan et al., 2023; Chen et al., 2023). `p` is the target's distribution, with temperature,
penalties and truncation applied; `q` the one that a draft token was sampled from, one-hot for a deterministic
candidate.

Token x is accepted with probability min(1, p(x) / q(x)). The target's token is sampled from p after the last accepted
token if all are accepted, and otherwise from the normalized residual max(p - q, 0) of the first rejected one. Random
numbers are keyed by seed and position: `Stream.ACCEPT` decides on candidates, and the noise of plain decoding samples
the target's token. The drafter must not have used either of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.drafters.drafts import DETERMINISTIC
from engine.executor.transfer import on_device
from engine.sampling.noise import Stream, gumbel_noise, stream_seeds, uniforms


class SampledPaths(NamedTuple):
    """n paths of draft tokens to verify, T tokens in total."""

    tokens: np.ndarray
    """int64 [T]."""
    q_rows: np.ndarray
    """int64 [T]: the row of `q` that each token was sampled from, `DETERMINISTIC` if it was not."""
    lengths: np.ndarray
    """int64 [n]: number of tokens of each path."""
    seeds: np.ndarray
    """int64 [n]."""
    positions: np.ndarray
    """int64 [n]: position of the first token of each path in its text."""


def verify_by_rejection(paths: SampledPaths, p: Tensor, q: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of accepted tokens of each path, and the target's token after them, int64 [n] each.

    p: float [T + n, V], the distributions after the context and after each token of the first path, then those of the
    second, and so on. q: float32 [R, V]; None if all tokens are deterministic candidates.
    """
    device = p.device
    q = None if q is None else q.to(device)
    owner = np.arange(len(paths.lengths)).repeat(paths.lengths)
    starts = np.cumsum(paths.lengths) - paths.lengths
    places = np.arange(len(owner)) - starts[owner]
    columns = (
        paths.tokens,
        paths.q_rows,
        np.arange(len(owner)) + owner,
        paths.seeds[owner],
        paths.positions[owner] + places,
    )
    tokens, q_rows, p_rows, seeds, positions = (on_device(column, device) for column in columns)
    target = p[p_rows, tokens].double()
    drafter = torch.ones_like(target)
    if q is not None:
        drafter = torch.where(q_rows == DETERMINISTIC, drafter, q[q_rows.clamp(min=0), tokens].double())
    thresholds = uniforms(stream_seeds(seeds, Stream.ACCEPT), positions, torch.zeros_like(positions))
    is_accepted = (thresholds * drafter < target).cpu().numpy()
    accepted = paths.lengths.copy()
    np.minimum.at(accepted, owner[~is_accepted], places[~is_accepted])
    weights = p[on_device(starts + np.arange(len(starts)) + accepted, device)]
    if len(rejected := np.flatnonzero(accepted < paths.lengths)):
        at = on_device((starts + accepted)[rejected], device)
        index = on_device(rejected, device)
        weights[index] = _residuals(weights[index], tokens[at], q_rows[at], q)
    seeds, positions = (on_device(column, device) for column in (paths.seeds, paths.positions + accepted))
    chosen = (weights.log() + gumbel_noise(seeds, positions, p.shape[1])).argmax(dim=1)
    return accepted, chosen.cpu().numpy()


def _residuals(p: Tensor, tokens: Tensor, q_rows: Tensor, q: Tensor | None) -> Tensor:
    """Return max(p - q, 0) after rejected tokens, [n, V]; not normalized, which sampling with noise does not need.

    p: [n, V]. tokens, q_rows: int64 [n], of the rejected tokens.
    """
    drafter = torch.zeros_like(p).scatter(1, tokens[:, None], 1)
    if q is not None:
        drafter = torch.where((q_rows == DETERMINISTIC)[:, None], drafter, q[q_rows.clamp(min=0)].to(p))
    rest = (p - drafter).clamp(min=0)
    # The residual is empty only if a token was rejected that q cannot have produced.
    return torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, p)
