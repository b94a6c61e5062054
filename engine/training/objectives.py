"""Losses of every kind of head: cross-entropy with the target's own distribution as the label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.decoder import Decoder
from engine.models.heads.head import DraftHead, HeadOutput, normalize
from engine.models.heads.medusa import MedusaHeads
from engine.training.attention import WindowAttention
from engine.training.cross_entropy import TEMPERATURE, cross_entropy, label_probabilities
from engine.training.unroll import run_chains, run_window
from engine.training.windows import Windows


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
