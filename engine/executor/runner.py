"""Forward passes of a model with attention over its KV cache, also of a model that is divided over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import make_attention, make_ops
from engine.attention.base import Attention, FixedAttention, RaggedRows, StepShape
from engine.executor.batch import Batch
from engine.executor.device_state import StepInputs
from engine.executor.ranks.leader import Cache, Move, Ranks, Step
from engine.executor.transfer import on_device
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.layers import PLAIN, Ops
from engine.models.lora.pool import AdapterPool
from engine.models.sharding import ShardedDecoder


def attention_config(model: Decoder) -> ModelConfig:
    """Return the shape of a model's layers on this rank."""
    return model.part if isinstance(model, ShardedDecoder) else model.config


def open_runner(model: Decoder, cache: Cache, adapters: AdapterPool | None = None) -> Runner:
    """Allocate a KV cache and return forward passes over it. adapters: of an undivided model.

    On rank 0 of a divided model, all ranks allocate a cache and open a runner; the one that was opened before can no
    longer be used.
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


class Runner:
    """A model and the attention over its KV cache."""

    def __init__(
        self,
        model: Decoder,
        attention: Attention,
        device: str = "cpu",
        ops: Ops = PLAIN,
        adapters: AdapterPool | None = None,
    ) -> None:
        """adapters: the LoRA adapters that are attached to the model."""
        self._model = model
        self._adapters = adapters
        self.attention = attention
        """Attention over the KV cache."""
        self._device = torch.device(device)
        self._ops = ops

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the batch's `logit_rows`, float32 [M, vocab_size]."""
        return self.forward_with_states(batch, ())[0]

    @torch.inference_mode()
    def forward_with_states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the logits of `forward`, and hidden states of all tokens after `layers`, [N, layers, hidden size]."""
        tokens, positions, rows = (
            on_device(array, self._device) for array in (batch.tokens, batch.positions, batch.logit_rows)
        )
        attend = self.attention.begin(batch)
        with nullcontext() if self._adapters is None else self._adapters.applied_to(batch):
            hidden, states = self._model.hidden_states(tokens, positions, attend, self._ops, layers)
        return self._model.logits(hidden[rows]).float(), states

    @torch.inference_mode()
    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy keys and values between slots of the cache, see `Attention.move`."""
        self.attention.move(sources, targets)

    def fixed(self, shape: StepShape) -> FixedForward:
        """Return the forward pass of steps of one shape, see `Attention.fixed`."""
        return FixedForward(self._model, self.attention.fixed(shape), self._ops)


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


class FixedForward:
    """Forward pass of steps of one shape; does not read tensors on the host."""

    def __init__(self, model: Decoder, attention: FixedAttention, ops: Ops) -> None:
        self._model = model
        self._attention = attention
        self._ops = ops

    def plan(self, contexts: np.ndarray, rows: np.ndarray) -> None:
        """Prepare a step, see `FixedAttention.plan`."""
        self._attention.plan(contexts, rows)

    def __call__(self, inputs: StepInputs, page_tables: Tensor) -> Tensor:
        """Return the logits of all rows, float32 [N, vocab_size]."""
        return self.with_states(inputs, page_tables, ())[0]

    def with_states(self, inputs: StepInputs, page_tables: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the logits, and hidden states of all rows after `layers`, [N, layers, hidden size]."""
        attend = self._attention.begin(RaggedRows(inputs.cache_slots, inputs.starts, inputs.contexts, page_tables))
        hidden, states = self._model.hidden_states(inputs.tokens, inputs.positions, attend, self._ops, layers)
        return self._model.logits(hidden).float(), states
