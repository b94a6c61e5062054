"""Convert draft heads and draft models to compiled networks, if these support all of their parts."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.drafters.compiled import layers
from engine.drafters.compiled.layers import NO_NORM, Network
from engine.drafters.compiled.matrices import COLUMNS, blocks_of
from engine.drafters.draft_model import ModelHead
from engine.models.decoder import Layer
from engine.models.heads.eagle import EagleHead
from engine.models.heads.eagle3 import Eagle3Head
from engine.models.heads.head import DraftHead
from engine.models.heads.mtp import MtpHead
from engine.models.layers import FeedForward, RMSNorm, SelfAttention
from engine.models.packed import Int8Linear, PackedLinear, round_to_int8
from engine.models.rope import Yarn
from engine.scheduling.request import SamplingParams

MAX_ROWS = 64
"""Largest number of tokens of a call. PyTorch runs more of them on all threads."""
MAX_WEIGHTS = 64 << 20
"""Largest number of weights of a compiled network, which runs on one thread. PyTorch runs larger ones on all threads,
which together read memory faster."""


class Parts(NamedTuple):
    """The modules of a head in the order of a compiled network."""

    layers: list[Layer]
    embedding: Tensor
    """[V, hidden size]."""
    combine: nn.Module | None
    vocabulary: nn.Module
    """The projection to logits."""
    embedding_norm: nn.Module | None
    state_norm: nn.Module | None
    final_norm: nn.Module | None
    input: int
    """Kind of input, see `layers`."""
    state: int
    """Kind of state, see `layers`."""
    zeroes_first: bool = False
    keeps_normalized: bool = False


def compile_head(head: DraftHead) -> Network | None:
    """Return a network that computes what an attached head does, with int8 weights; None if that is not supported.

    Experts, latent attention, adapters, models that are not float32 on a CPU, and more than `MAX_WEIGHTS` weights are
    not supported. Embeddings are shared with the head, other weights are copied.
    """
    parts = _parts(head)
    if parts is None or not _is_supported(parts):
        return None
    writer = _Writer(head)
    for layer in parts.layers:
        assert isinstance(layer.attention, SelfAttention)
        assert isinstance(layer.feed_forward, FeedForward)
        attention, mlp = layer.attention, layer.feed_forward
        writer.add_matrices((attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj))
        norms = (None, None) if attention.qk_norm is None else (attention.qk_norm.query, attention.qk_norm.key)
        writer.add_norms((layer.input_norm, layer.mlp_norm, *norms))
    writer.add_matrices((parts.combine, parts.vocabulary))
    writer.add_norms((parts.embedding_norm, parts.state_norm, parts.final_norm))
    return writer.network(parts)


def can_sample(sampling: SamplingParams, *, is_coupled: bool) -> bool:
    """Return whether compiled networks sample with these settings; `is_coupled`: as in `DraftSampler`."""
    return not (sampling.adjusts or sampling.truncates or (sampling.uses_rejection and not is_coupled))


def _parts(head: DraftHead) -> Parts | None:
    """Return the modules of a head; None for kinds that are not compiled."""
    embedding = (head.embedding or head.target.embedding).weight.detach()
    vocabulary = head.lm_head or head.target.lm_head
    if isinstance(head, ModelHead):
        model = head.model
        every = [layer for layer in model.layers if isinstance(layer, Layer)]
        weight = model.embedding.weight.detach()
        return Parts(every, weight, None, model.lm_head, None, None, model.norm, layers.TOKENS, layers.NO_STATE)
    if isinstance(head, MtpHead):
        return Parts(
            [head.layer], embedding, head.fc, vocabulary, head.embedding_norm, head.hidden_norm, head.norm,
            layers.COMBINED, layers.NORMALIZED, zeroes_first=head.zeroes_first,
        )  # fmt: skip
    if isinstance(head, EagleHead):
        return Parts([head.layer], embedding, head.fc, vocabulary, None, None, None, layers.COMBINED, layers.SUM)
    if isinstance(head, Eagle3Head):
        state = layers.NORMALIZED if head.style.norm_output else layers.SUM
        return Parts(
            [head.layer], embedding, None, vocabulary, head.layer.input_norm, head.layer.hidden_norm, head.norm,
            layers.PAIRS, state, keeps_normalized=head.style.norm_before_residual,
        )  # fmt: skip
    return None


def _is_supported(parts: Parts) -> bool:
    weight = parts.embedding
    if not weight.is_cpu or weight.dtype != torch.float32 or not weight.is_contiguous():
        return False
    linears: list[nn.Module | None] = [parts.combine, parts.vocabulary]
    for layer in parts.layers:
        if not isinstance(layer.attention, SelfAttention) or not isinstance(layer.feed_forward, FeedForward):
            return False
        attention, mlp = layer.attention, layer.feed_forward
        linears += [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    found = [_shape(linear) for linear in linears if linear is not None]
    return None not in found and sum(prod(shape) for shape in found if shape) <= MAX_WEIGHTS


def _shape(linear: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of the weight of a linear layer, None if it cannot be read."""
    if isinstance(linear, Int8Linear):
        return tuple(linear.values.shape)
    if isinstance(linear, PackedLinear):
        return tuple(linear.shape)
    return tuple(linear.weight.shape) if type(linear) is nn.Linear else None


def _rounded(linear: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of a linear layer, int8 [out, in], and their scales, float32 [out]."""
    if isinstance(linear, Int8Linear):
        return linear.values.numpy(), linear.scales[:, 0].numpy()
    assert isinstance(linear, PackedLinear | nn.Linear)
    weight = linear.plain_weight() if isinstance(linear, PackedLinear) else linear.weight.detach()
    values, scales = round_to_int8(weight)
    return values.numpy(), scales[:, 0].numpy()


class _Writer:
    """Collects the arrays of a `Network`."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        config = head.config
        half = config.head_dim // 2
        scaling = config.rope.scaling
        turn_scale = scaling.attention_factor if isinstance(scaling, Yarn) else 1.0
        frequencies = (head.model if isinstance(head, ModelHead) else head).frequencies[:half].numpy()
        self._weights: list[np.ndarray] = []
        self._floats = [np.array([config.rms_norm_eps, turn_scale], np.float32), frequencies]
        self._matrices: list[list[int]] = []
        self._norms: list[int] = []
        self._weight_count, self._float_count = 0, 2 + half

    def add_matrices(self, linears: Iterable[nn.Module | None]) -> None:
        """Append matrices; None stands for one that the network does not have."""
        for linear in linears:
            if linear is None:
                self._matrices.append([0] * COLUMNS)
                continue
            values, scales = _rounded(linear)
            bias = getattr(linear, "bias", None)
            first = self._weight_count
            self._weights.append(blocks_of(values))
            self._weight_count += values.size
            at = -1 if bias is None else self._add(bias.detach().numpy())
            self._matrices.append([first, self._add(scales), at, values.shape[1], values.shape[0]])

    def add_norms(self, norms: Iterable[nn.Module | None]) -> None:
        """Append norms; None and `NoNorm` stand for one that the network does not have."""
        for norm in norms:
            self._norms.append(self._add(norm.weight.detach().numpy()) if isinstance(norm, RMSNorm) else NO_NORM)

    def network(self, parts: Parts) -> Network:
        """Return the network."""
        config, ids = self._head.config, self._head.draft_vocabulary
        sizes = [
            len(parts.layers), config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            parts.input, parts.zeroes_first, parts.keeps_normalized, parts.state,
        ]  # fmt: skip
        return Network(
            np.concatenate(self._weights),
            np.concatenate(self._floats).astype(np.float32),
            np.array(self._matrices, np.int64),
            np.array(self._norms, np.int64),
            np.array(sizes, np.int64),
            parts.embedding.numpy(),
            np.empty(0, np.int64) if ids is None else ids.numpy(),
        )

    def _add(self, values: np.ndarray) -> int:
        """Append floats; return their place."""
        self._floats.append(values)
        self._float_count += len(values)
        return self._float_count - len(values)
