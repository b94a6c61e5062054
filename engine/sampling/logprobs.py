"""Log-probabilities of tokens and of the most likely alternatives.

They are computed from the raw logits, before bias, penalties, temperature and truncation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # The HTTP process imports this module and must not import PyTorch.
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities of N tokens, in nats."""

    tokens: np.ndarray
    """float32 [N]: log-probabilities of the tokens."""
    top_ids: np.ndarray
    """uint32 [N, n]: the n most likely tokens, in descending order."""
    top: np.ndarray
    """float32 [N, n]: log-probabilities of `top_ids`."""

    def part(self, start: int, end: int, count: int | None = None) -> Logprobs:
        """Return the log-probabilities of tokens `start` to `end`, with `count` alternatives each (None: all)."""
        return Logprobs(self.tokens[start:end], self.top_ids[start:end, :count], self.top[start:end, :count])


def compute_logprobs(logits: Tensor, tokens: np.ndarray, count: int) -> Logprobs:
    """Return the log-probabilities of `tokens`, uint32 [N], with up to `count` alternatives each.

    logits: float32 [N, V].
    """
    import torch

    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[:, None])
    best = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    return Logprobs(
        tokens=own[:, 0].cpu().numpy(),
        top_ids=best.indices.cpu().numpy().astype(np.uint32),
        top=best.values.cpu().numpy(),
    )


def compute_parts(
    logits: Tensor, rows: Mapping[int, np.ndarray], tokens: Mapping[int, np.ndarray], counts: Mapping[int, int]
) -> dict[int, Logprobs]:
    """Return the log-probabilities of several sequences by index; the indices are the keys of `counts`.

    logits: float32 [M, V]. rows, tokens: rows of `logits`, int64 [n], and the tokens after them, uint32 [n], of each
    sequence. counts: numbers of alternatives.
    """
    if not counts:
        return {}
    together = compute_logprobs(
        logits[np.concatenate([rows[index] for index in counts])],
        np.concatenate([tokens[index] for index in counts]),
        max(counts.values()),
    )
    parts, start = {}, 0
    for index, count in counts.items():
        end = start + len(rows[index])
        parts[index] = together.part(start, end, count)
        start = end
    return parts


def join_logprobs(parts: Sequence[Logprobs], count: int) -> Logprobs:
    """Concatenate log-probabilities; without parts, return an empty result with `count` alternatives."""
    nothing = Logprobs(
        np.empty(0, np.float32),
        np.empty((0, count), np.uint32),
        np.empty((0, count), np.float32),
    )
    parts = parts or [nothing]
    return Logprobs(
        tokens=np.concatenate([part.tokens for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top=np.concatenate([part.top for part in parts]),
    )
