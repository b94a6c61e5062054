"""Losses of every kind of head: cross-entropy with the target's own distribution as the label, over windows of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.decoder import Decoder
from engine.models.heads.head import DraftHead, HeadOutput, normalize
from engine.models.heads.medusa import MedusaHeads

BATCH_TOKENS = 4096
"""Tokens in one forward pass of the target."""
TEMPERATURE = 0.8
"""Temperature of labels and predictions: drafts are wanted for temperatures from 0 to 1."""
PART_ROWS = 256
"""Rows of logits computed at once: 4 MiB for a vocabulary of 4,096, which stay in the processor's cache."""


class Windows(NamedTuple):
    """A batch of B windows of T tokens."""

    tokens: Tensor
    """int64 [B, T]."""
    states: Tensor
    """float32 [B, T, L, H]: the target's hidden states after the selected layers."""


def read_windows(target: Decoder, tokens: np.ndarray, layers: tuple[int, ...]) -> Windows:
    """Return windows, uint32 [B, T], with the target's states after `layers`. Each window is run without context."""
    text = torch.from_numpy(tokens.astype(np.int64))
    batches = text.split(max(1, BATCH_TOKENS // text.shape[1]))
    return Windows(text, torch.cat([_states(target, batch, layers) for batch in batches]))


@torch.no_grad()
def _states(target: Decoder, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    rows, length = tokens.shape
    attend = WindowAttention(rows, length).attend
    states = target.hidden_states(tokens.flatten(), torch.arange(length).repeat(rows), attend, layers=layers)[1]
    return states.view(rows, length, *states.shape[1:])


class WindowAttention:
    """Causal attention within B windows of M rows; keeps keys and values, [B, kv_heads, M, head_dim] by layer."""

    def __init__(self, windows: int, rows: int) -> None:
        self._shape = (windows, rows)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attend`."""
        query, key, value = (x.view(*self._shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        self.keys[layer], self.values[layer] = key, value
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)


class ChainAttention:
    """Attention of chains to the rows of a window up to their start, and to their own earlier steps."""

    def __init__(self, window: WindowAttention, starts: Tensor) -> None:
        """starts: int64 [B, C], rows of the window."""
        self._window = window
        self._shape = tuple(starts.shape)
        self._starts = starts
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute a layer for the next step of all chains, [B * C, heads, head_dim]; see `Attend`."""
        query, key, value = (x.view(*self._shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        own_keys = self._keys.setdefault(layer, [])
        own_values = self._values.setdefault(layer, [])
        own_keys.append(key)
        own_values.append(value)
        keys, values = self._window.keys[layer], self._window.values[layer]
        rows = keys.shape[2]
        # [B, kv_heads, group, C, head_dim]; the group shares a key head.
        grouped = query.unflatten(1, (keys.shape[1], -1)) * query.shape[-1] ** -0.5
        hidden = torch.arange(rows) > self._starts[:, None, None, :, None]
        scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).masked_fill(hidden, float("-inf"))
        own_scores = [(grouped * own.unsqueeze(2)).sum(-1, keepdim=True) for own in own_keys]
        weights = torch.cat((scores, *own_scores), dim=-1).softmax(dim=-1)
        attended = weights[..., :rows] @ values.unsqueeze(2)
        for step, own in enumerate(own_values):
            attended = attended + weights[..., rows + step, None] * own.unsqueeze(2)
        return attended.flatten(1, 2).transpose(1, 2).flatten(0, 1)


def run_window(head: DraftHead, tokens: Tensor, states: Tensor) -> tuple[HeadOutput, WindowAttention]:
    """Run step 0 and return its output, [B, M, hidden_size] each, and what chains attend to.

    tokens: int64 [B, M + 1]. states: [B, M, hidden_size], from `DraftHead.target_states`, of all but the last token.
    Row r is the pair (state of r, token r + 1). The first token has no pair.
    """
    windows, rows = states.shape[:2]
    attention = WindowAttention(windows, rows)
    positions = torch.arange(1, rows + 1).repeat(windows)
    output = head(tokens[:, 1:].flatten(), states.flatten(0, 1), positions, attention.attend)
    return _as_windows(output, windows), attention


def run_chains(
    head: DraftHead, tokens: Tensor, first: HeadOutput, window: WindowAttention, starts: Tensor, steps: int
) -> list[HeadOutput]:
    """Run steps 1 to `steps` of chains and return their outputs, [B, C, hidden_size] each.

    first: output of step 0. starts: int64 [B, C], rows of the window, at most M - 1 - steps.
    """
    windows = len(starts)
    attention = ChainAttention(window, starts)
    states = first.state.gather(1, starts[..., None].expand(-1, -1, first.state.shape[-1]))
    outputs = []
    for step in range(1, steps + 1):
        positions = starts + step + 1
        text = tokens.gather(1, positions).flatten()
        output = head(text, states.flatten(0, 1), positions.flatten(), attention.attend)
        outputs.append(_as_windows(output, windows))
        states = outputs[-1].state
    return outputs


def _as_windows(output: HeadOutput, windows: int) -> HeadOutput:
    return HeadOutput(*(x.view(windows, -1, x.shape[-1]) for x in output))


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


class Depths(NamedTuple):
    """Results by draft depth, float32 [J] each."""

    losses: Tensor
    """Mean loss in nats; from depth 2 on weighted with the probability that the drafts before are accepted."""
    accepted: Tensor
    """Mean probability that all drafts up to this depth are accepted; their sum is the mean number accepted."""


class Objective(Protocol):
    """Computes the loss of one kind of head."""

    @property
    def module(self) -> nn.Module:
        """The head that is trained."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose states it needs, ascending."""
        ...

    def __call__(self, windows: Windows) -> Depths:
        """Return losses for a batch of windows."""
        ...


@dataclass(frozen=True)
class ChainObjective:
    """Loss of a head that is run once per draft position, with training-time test."""

    module: DraftHead
    target: Decoder
    depth: int
    """Draft positions, 1 or more."""
    chain_share: float = 1.0
    """Share of the rows from which chains of more than one position begin: those whose first draft is most likely to
    be accepted."""

    @property
    def layers(self) -> tuple[int, ...]:
        """See `Objective`."""
        return tuple(sorted({*self.module.hidden_layers, self.target.config.num_layers}))

    def __call__(self, windows: Windows) -> Depths:
        """See `Objective`."""
        head, tokens = self.module, windows.tokens
        rows = tokens.shape[1] - 1
        columns = [self.layers.index(layer) for layer in head.hidden_layers]
        states = head.target_states(windows.states[:, :-1, columns].flatten(0, 1)).view(len(tokens), rows, -1)
        wanted = normalize(self.target.norm, windows.states[:, 1:, -1])
        labels = label_probabilities(self.target, wanted, head.draft_vocabulary)
        first, window = run_window(head, tokens, states)
        loss, acceptance = self._scores(first, labels)
        losses, accepted = [loss.mean()], [acceptance.mean()]
        if self.depth > 1:
            starts = likeliest(acceptance, rows - self.depth + 1, self.chain_share)
            reach, usable = acceptance.gather(1, starts), len(tokens) * (rows - self.depth + 1)
            for step, output in enumerate(run_chains(head, tokens, first, window, starts, self.depth - 1), 1):
                loss, acceptance = self._scores(output, _rows(labels, starts + step))
                losses.append((loss * reach).sum() / usable)
                reach = reach * acceptance
                accepted.append(reach.sum() / usable)
        return Depths(torch.stack(losses), torch.stack(accepted))

    def _scores(self, output: HeadOutput, labels: Tensor) -> tuple[Tensor, Tensor]:
        projection = self.module.lm_head or self.target.lm_head
        assert isinstance(projection, nn.Linear)
        return cross_entropy(output.hidden, projection.weight, labels)


def likeliest(acceptance: Tensor, usable: int, share: float) -> Tensor:
    """Return the share of the first `usable` rows with the largest acceptance, int64 [B, C]; acceptance: [B, M]."""
    return acceptance[:, :usable].topk(max(1, int(usable * share)), dim=1).indices


@dataclass(frozen=True)
class MedusaObjective:
    """Loss of Medusa heads: head i at position t predicts the token of position t + i + 2."""

    module: MedusaHeads
    target: Decoder

    @property
    def layers(self) -> tuple[int, ...]:
        """See `Objective`."""
        return self.module.hidden_layers

    def __call__(self, windows: Windows) -> Depths:
        """See `Objective`."""
        states = normalize(self.target.norm, windows.states[:, :, -1])
        labels = label_probabilities(self.target, states)
        count = len(self.module.heads)
        read = states[:, :-count].flatten(0, 1)
        losses, accepted, reach = [], [], torch.ones(len(read))
        for ahead, head in enumerate(self.module.heads, 1):
            label = labels[:, ahead : labels.shape[1] - count + ahead].flatten(0, 1)
            log_q = F.log_softmax(head(read) / TEMPERATURE, dim=-1)
            with torch.no_grad():
                reach = reach * torch.minimum(label, log_q.exp()).sum(-1)
            losses.append(-(label * log_q).sum(-1).mean())
            accepted.append(reach.mean())
        return Depths(torch.stack(losses), torch.stack(accepted))


@dataclass(frozen=True)
class DraftModelObjective:
    """Loss of a draft model that reads only the text, with the target's embeddings, which are not trained."""

    module: Decoder
    target: Decoder
    depth: int
    """Draft positions for which the acceptance is estimated."""

    @property
    def layers(self) -> tuple[int, ...]:
        """See `Objective`."""
        return (self.target.config.num_layers,)

    def __call__(self, windows: Windows) -> Depths:
        """See `Objective`."""
        rows, length = windows.tokens.shape
        positions = torch.arange(length).repeat(rows)
        hidden = self.module(windows.tokens.flatten(), positions, WindowAttention(rows, length).attend)
        labels = label_probabilities(self.target, normalize(self.target.norm, windows.states[:, :, -1]))
        loss, acceptance = cross_entropy(hidden.view(rows, length, -1), self.module.lm_head.weight, labels)
        runs = acceptance.unfold(1, self.depth, 1).cumprod(-1)
        return Depths(loss.mean()[None], runs.mean((0, 1)))


def _rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return values [B, M, X] at rows int64 [B, C], [B, C, X]."""
    return values.gather(1, rows[..., None].expand(-1, -1, values.shape[-1]))
