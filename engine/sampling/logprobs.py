"""Log-probabilities of tokens and of their likeliest alternatives.

They are the model's own, before bias, penalties, temperature and truncation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # Whoever merely reads them, such as the HTTP process, goes without PyTorch.
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Logprobs:
    """What a model thought of N tokens, in nats."""

    tokens: np.ndarray
    """float32 [N]: of the tokens themselves."""
    ranks: np.ndarray
    """int64 [N]: their places among all tokens; 1 is the likeliest."""
    top_ids: np.ndarray
    """uint32 [N, n]: the likeliest tokens, best first."""
    top: np.ndarray
    """float32 [N, n]: theirs."""

    def at(self, rows: np.ndarray) -> Logprobs:
        """Some of the tokens, by their indices, int64 [n]."""
        return Logprobs(self.tokens[rows], self.ranks[rows], self.top_ids[rows], self.top[rows])

    def part(self, start: int, end: int, count: int) -> Logprobs:
        """Tokens `start` to `end`, with `count` alternatives each."""
        return Logprobs(
            self.tokens[start:end], self.ranks[start:end], self.top_ids[start:end, :count], self.top[start:end, :count]
        )


def logprobs_of(logits: Tensor, tokens: np.ndarray, count: int) -> Logprobs:
    """Of `tokens`, uint32 [N], under logits float32 [N, V], with at most `count` alternatives each."""
    import torch

    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[:, None])
    best = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    return Logprobs(
        tokens=own[:, 0].cpu().numpy(),
        ranks=(1 + (logprobs > own).sum(dim=-1)).cpu().numpy(),
        top_ids=best.indices.cpu().numpy().astype(np.uint32),
        top=best.values.cpu().numpy(),
    )


def joined(parts: Sequence[Logprobs], count: int) -> Logprobs:
    """One row of tokens from its parts; of none if there is none, with `count` alternatives."""
    nothing = Logprobs(
        np.empty(0, np.float32),
        np.empty(0, np.int64),
        np.empty((0, count), np.uint32),
        np.empty((0, count), np.float32),
    )
    parts = parts or [nothing]
    return Logprobs(
        tokens=np.concatenate([part.tokens for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top=np.concatenate([part.top for part in parts]),
    )
