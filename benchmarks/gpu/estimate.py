"""How long a step must take at least: what it reads, and what it computes. `docs/gpu.md` tells the derivation."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches, measured."""

    bytes_per_s: float
    """Of a large copy, bytes read and bytes written both counted."""
    flops_per_s: float
    """Of a large matrix product."""


def matrix_weights(model: ModelConfig) -> int:
    """Weights that multiply every token: of the layers and of the output. The embedding is looked up, a row a token."""
    heads = model.num_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * model.head_dim * (heads + model.num_heads)
    feed_forward = 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * (attention + feed_forward) + model.hidden_size * model.vocab_size


def kv_bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    """Of keys and values of one token in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize


def step_bytes(model: ModelConfig, contexts: list[int], tokens: int, itemsize: int) -> int:
    """Bytes that a step reads and writes: every weight once, keys and values of each context, and those of new tokens.

    contexts: of each sequence, in tokens. tokens: run by each. Hidden states and logits are left out: beside the
    weights of the models that this is for they are less than one in a hundred.
    """
    weights = matrix_weights(model) * itemsize
    kept = kv_bytes_per_token(model, itemsize) * (sum(contexts) + tokens * len(contexts))
    return weights + kept


def step_flops(model: ModelConfig, contexts: list[int], tokens: int) -> int:
    """Of the same step: 2 for each weight and token, and 4 for each head's dimension, query and key."""
    products = 2 * matrix_weights(model) * tokens * len(contexts)
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * tokens * sum(contexts)
    return products + attention


def step_seconds(model: ModelConfig, contexts: list[int], tokens: int, itemsize: int, ceilings: Ceilings) -> float:
    """Bandwidth plus compute, as if nothing were computed while anything is loaded: kernels that overlap are faster."""
    loading = step_bytes(model, contexts, tokens, itemsize) / ceilings.bytes_per_s
    return loading + step_flops(model, contexts, tokens) / ceilings.flops_per_s


def overlapped_seconds(
    model: ModelConfig, contexts: list[int], tokens: int, itemsize: int, ceilings: Ceilings
) -> float:
    """The larger of the two: a bound that no kernel beats."""
    loading = step_bytes(model, contexts, tokens, itemsize) / ceilings.bytes_per_s
    return max(loading, step_flops(model, contexts, tokens) / ceilings.flops_per_s)
