"""Lower bounds of a step's time, by the bytes that it reads and the operations that it computes; see `docs/gpu.md`."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """Measured bandwidth and compute rate of a device."""

    bytes_per_s: float
    """Bandwidth of a large copy; bytes read and bytes written both count."""
    flops_per_s: float
    """Operations per second of a large matrix product."""


def matrix_weights(model: ModelConfig) -> int:
    """Return the number of weights that every token is multiplied with: the layers and the output projection."""
    heads = model.num_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * model.head_dim * (heads + model.num_heads)
    feed_forward = 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * (attention + feed_forward) + model.hidden_size * model.vocab_size


def kv_bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize


def step_bytes(model: ModelConfig, contexts: list[int], tokens: int, itemsize: int) -> int:
    """Return the bytes that a step reads and writes: weights once, keys and values of contexts and of new tokens.

    contexts: number of tokens of each sequence before the step. tokens: number of tokens that each sequence runs.
    Hidden states and logits are left out: less than 1 % of the bytes for the models measured here.
    """
    weights = matrix_weights(model) * itemsize
    kept = kv_bytes_per_token(model, itemsize) * (sum(contexts) + tokens * len(contexts))
    return weights + kept


def step_flops(model: ModelConfig, contexts: list[int], tokens: int) -> int:
    """Return the operations of the same step: 2 per weight and token, and 4 per dimension of a head, query and key."""
    products = 2 * matrix_weights(model) * tokens * len(contexts)
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * tokens * sum(contexts)
    return products + attention


def step_seconds(model: ModelConfig, contexts: list[int], tokens: int, itemsize: int, ceilings: Ceilings) -> float:
    """Return the time to load plus the time to compute; kernels that overlap them are faster."""
    loading = step_bytes(model, contexts, tokens, itemsize) / ceilings.bytes_per_s
    return loading + step_flops(model, contexts, tokens) / ceilings.flops_per_s


def overlapped_seconds(
    model: ModelConfig, contexts: list[int], tokens: int, itemsize: int, ceilings: Ceilings
) -> float:
    """Return the larger of the two times, a lower bound for any kernel."""
    loading = step_bytes(model, contexts, tokens, itemsize) / ceilings.bytes_per_s
    return max(loading, step_flops(model, contexts, tokens) / ceilings.flops_per_s)
