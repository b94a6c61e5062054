"""A whole model as the drafter: a smaller one with the same vocabulary, or an int8 copy of the target.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
"""

from __future__ import annotations

from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.heads.head import DraftHead, HeadOutput
from engine.models.layers import PLAIN, Attend, Ops


class ModelHead(DraftHead):
    """A decoder with the interface of a head that reads no states."""

    hidden_layers = ()
    first_slot = 0
    state_size = 0

    def __init__(self, model: Decoder, *, shares_target_cache: bool = False) -> None:
        """shares_target_cache: whether the model reads the target's keys and values instead of its own, as a copy of
        the target can. Then it never has to catch up with the target.
        """
        super().__init__(model.config)
        self.model = model
        self.num_layers = model.config.num_layers
        self.shares_target_cache = shares_target_cache
        if shares_target_cache:
            self.copies = (model,)

    def forward(
        self, tokens: Tensor, _states: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN
    ) -> HeadOutput:
        """See `DraftHead.forward`."""
        hidden = self.model(tokens, positions, attend, ops)
        return HeadOutput(hidden, hidden[:, :0])

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        return self.model.logits(hidden)
