"""Create a KV cache and run forward passes over it, for a whole model or on all ranks of a divided one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.attention.backend import make_attention, make_ops
from engine.attention.base import Attention, StepShape
from engine.executor.batch import Batch
from engine.executor.ranks.leader import Cache, Move, Ranks, Step
from engine.executor.runner import FixedForward, Runner
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.layers import Ops
from engine.models.lora.pool import AdapterPool
from engine.models.sharding import ShardedDecoder


def attention_config(model: Decoder) -> ModelConfig:
    """Return the shape of a model's layers on this rank."""
    return model.part if isinstance(model, ShardedDecoder) else model.config


def open_runner(model: Decoder, cache: Cache, adapters: AdapterPool | None = None) -> Runner:
    """Allocate a KV cache and return forward passes over it. adapters: of an undivided model.

    On rank 0 of a divided model, all ranks do both; the runner that was opened before can no longer be used.
    """
    weight = model.embedding.weight
    device = str(weight.device)
    shape = attention_config(model)
    attention = make_attention(cache.backend, shape, cache.pages, cache.page_size, weight.dtype, device)
    ops = make_ops(cache.backend)
    if isinstance(model, ShardedDecoder) and isinstance(model.group, Ranks):
        with model.group.reporting():
            model.group.send(cache)
        return LeadingRunner(model, model.group, attention, device, ops)
    return Runner(model, attention, device, ops, adapters)


class LeadingRunner(Runner):
    """Rank 0's forward passes, each of which it starts on the other ranks with one message."""

    def __init__(self, model: Decoder, ranks: Ranks, attention: Attention, device: str, ops: Ops) -> None:
        super().__init__(model, attention, device, ops)
        self._ranks = ranks

    def forward_with_states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `Runner.forward_with_states`. Raises UserError if a rank has ended."""
        with self._ranks.reporting():
            self._ranks.send(Step(batch, tuple(layers)))
            return super().forward_with_states(batch, layers)

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """See `Runner.move`. Raises UserError if a rank has ended."""
        with self._ranks.reporting():
            self._ranks.send(Move(sources, targets))
        super().move(sources, targets)

    def fixed(self, _shape: StepShape) -> FixedForward:
        """Raise ValueError, because CUDA graphs contain no messages."""
        raise ValueError("a divided model has no steps of a fixed shape")
