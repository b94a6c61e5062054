"""Base of draft heads: networks that read the target's hidden states and share weights with it.

Slot t of a head stores what results from the pair (state of position t - 1, token t); its output there predicts token
t + 1. For committed tokens the states are the target's, `DraftHead.target_states`. To draft further, the head's own
`HeadOutput.state` takes their place (Li et al., EAGLE, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.layers import PLAIN, Attend, Ops, RMSNorm, Rotation


class HeadOutput(NamedTuple):
    """Output of a head for N pairs of a state and a token."""

    hidden: Tensor
    """[N, hidden_size]: input of `DraftHead.logits`."""
    state: Tensor
    """[N, hidden_size]: takes the place of the target's state at the next position."""


class DraftHead(nn.Module):
    """Base of heads that run once per draft position, with attention over their own slots.

    Modules that a checkpoint does not have are None, and the target's are used in their place after `attach`.
    """

    hidden_layers: tuple[int, ...]
    """Layers of the target whose hidden states the head reads, as in `TargetOutputs.hidden_layers`."""
    num_layers = 1
    """Number of layers that store keys and values."""
    first_slot = 1
    """First slot that the head computes; there is no state before position 0."""
    shares_target_cache = False
    """Whether the head reads and writes the target's own keys and values."""
    copies: Sequence[Decoder] = ()
    """Copies of the target among the head's modules, whose weights change with the target's."""
    draft_vocabulary: Tensor | None
    """int64 [draft vocabulary]: the target's token of each of the head's logits; None if both vocabularies are
    equal."""
    embedding: nn.Embedding | None
    lm_head: nn.Module | None
    frequencies: Tensor
    """Rope frequencies for both halves of an attention head, float32 [head_dim]."""

    def __init__(self, config: ModelConfig) -> None:
        """config: shape of the head's layers."""
        super().__init__()
        self.config = config
        self.embedding = None
        self.lm_head = None
        self.register_buffer("draft_vocabulary", None)
        with torch.device("cpu"):  # operators on the meta device import torch._dynamo, which takes seconds
            frequencies = config.rope.frequencies(config.head_dim).repeat(2)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self._attached: tuple[Decoder, ...] = ()

    @property
    def state_size(self) -> int:
        """Size of a state; 0 if the head reads only tokens."""
        return self.config.hidden_size

    def attach(self, target: Decoder) -> None:
        """Use the target's modules where the head has none of its own.

        A frozen copy of the target's embedding, with which EAGLE heads are published, is dropped.
        """
        self._attached = (target,)  # in a tuple, so that the target's weights are not counted as the head's
        if self.embedding is not None and _is_copy(self.embedding.weight, target.embedding.weight):
            self.embedding = None

    @property
    def target(self) -> Decoder:
        """The target that the head is attached to."""
        return self._attached[0]

    def target_states(self, hidden: Tensor) -> Tensor:
        """Return the states that `forward` reads for committed tokens, [N, hidden_size].

        hidden: [N, L, target's hidden size], the target's hidden states after `hidden_layers`. By default these are the
        last ones, which pass the target's final norm.
        """
        return normalize(self.target.norm, hidden[:, 0])

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN
    ) -> HeadOutput:
        """Run the head for N pairs.

        tokens: int64 [N]. states: [N, hidden_size], of the position before each token. positions: int64 [N].
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the draft vocabulary, [N, hidden_size] -> [N, draft vocabulary]."""
        logits: Tensor = (self.lm_head or self.target.lm_head)(hidden)
        return logits

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, float32 [N, V], -inf outside of the draft vocabulary."""
        logits = self.logits(hidden).float()
        if self.draft_vocabulary is None:
            return logits
        whole = logits.new_full((len(logits), self.target.config.vocab_size), float("-inf"))
        return whole.index_copy_(1, self.draft_vocabulary, logits)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, int64 [N] -> [N, hidden_size]."""
        embeddings: Tensor = (self.embedding or self.target.embedding)(tokens)
        return embeddings

    def rotation(self, positions: Tensor, ops: Ops, like: Tensor) -> Rotation:
        """Return the rotation of attention heads at `positions`, int64 [N], in the dtype of `like`."""
        cos, sin = self.config.rope.turns(positions, self.frequencies)
        return ops.rotation(cos, sin, like.dtype)


def _is_copy(weight: Tensor, original: Tensor) -> bool:
    has_same_form = weight.shape == original.shape and weight.dtype == original.dtype
    return not weight.requires_grad and has_same_form and torch.equal(weight, original)


class NoNorm(nn.Module):
    """Takes the place of a norm that a checkpoint does not have."""

    def normalize_sum(self, residual: Tensor, change: Tensor | None, _ops: Ops) -> tuple[Tensor, Tensor]:
        """Return residual + change twice, like `RMSNorm.normalize_sum` without a norm."""
        total = residual if change is None else residual + change
        return total, total.clone()


def normalize(norm: nn.Module, hidden: Tensor, ops: Ops = PLAIN) -> Tensor:
    """Return normalized hidden states, [N, hidden_size]."""
    assert isinstance(norm, RMSNorm | NoNorm)
    return norm.normalize_sum(hidden, None, ops)[1]
