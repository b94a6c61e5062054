"""Cross-entropy between the target's distribution and a head's, through an output projection that is not trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.models.decoder import Decoder

TEMPERATURE = 0.8
"""Temperature of labels and predictions: drafts are wanted for temperatures from 0 to 1."""
PART_ROWS = 256
"""Rows of logits computed at once: 4 MiB for a vocabulary of 4,096, which stay in the processor's cache."""


@torch.no_grad()
def label_probabilities(target: Decoder, states: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return the target's probabilities, [.., V], at `TEMPERATURE`; of some tokens, so that they add up to less than 1.

    states: [.., hidden_size], the normalized last states. tokens: int64 [V]; None for all.
    """
    probabilities = torch.softmax(target.logits(states / TEMPERATURE), dim=-1)
    return probabilities if tokens is None else probabilities[..., tokens]


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of predictions q with labels p, and the probability that a draft is accepted.

    hidden: [.., hidden_size], input of the output projection with the given weight [V, hidden_size]; both are divided
    by `TEMPERATURE`. labels: [.., V]. The results have the shape [..]. The probability is that of rejection sampling,
    sum(min(p, q)), and has no gradient; neither has `weight`.
    """
    flat = hidden.flatten(0, -2) / TEMPERATURE
    losses, accepted = _CrossEntropy.apply(flat, weight.detach(), labels.flatten(0, -2))
    return losses.view(hidden.shape[:-1]), accepted.view(hidden.shape[:-1])


class _CrossEntropy(torch.autograd.Function):
    """Computes the gradient in the forward pass, so that no logits need to be stored."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and acceptance, [N] each; hidden: [N, H], weight: [V, H], labels: [N, V]."""
        gradient = torch.empty_like(hidden)
        losses, accepted = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))
        for first in range(0, len(hidden), PART_ROWS):
            part = slice(first, first + PART_ROWS)
            logits, label = hidden[part] @ weight.T, labels[part]
            total = label.sum(-1)
            losses[part] = logits.logsumexp(-1) * total - (label * logits).sum(-1)
            probabilities = logits.softmax(-1)
            accepted[part] = torch.minimum(probabilities, label).sum(-1)
            gradient[part] = probabilities.mul_(total[:, None]).sub_(label) @ weight
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(accepted)
        return losses, accepted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of `hidden`; gradients: of losses and of acceptance, which has none."""
        return ctx.saved_tensors[0] * gradients[0][:, None], None, None
