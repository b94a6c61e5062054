"""Models of well-known shapes with random weights, and lower bounds of the time of their steps.

Random weights are as fast as the originals, with meaningless outputs. The bounds follow from the bytes that a step
reads and the operations that it computes; see `docs/gpu.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import allocate
from engine.models.rope import Llama3, Rope

SHAPES = {
    "llama3-8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=8192,
        rope=Rope(500_000.0),
        tie_embeddings=False,
    ),
    "llama3-1b": ModelConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_positions=131_072,
        rope=Rope(500_000.0, Llama3(32.0, 1.0, 4.0, 8192)),
    ),
    "qwen3-0.6b": ModelConfig(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40_960,
        rms_norm_eps=1e-6,
        rope=Rope(1_000_000.0),
        qk_norm=True,
        architecture="Qwen3ForCausalLM",
    ),
    "tiny": ModelConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=2048,
    ),
}
"""Llama 3 8B, Llama 3.2 1B, Qwen3 0.6B, and one for tests, with the shipped model's vocabulary."""

DEVIATION = 0.02
"""Standard deviation of the weights; the initialisation of these families."""


def random_model(config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> Decoder:
    """Return a decoder with random weights, sampled on its device with seed 0; weights differ between device types.

    Raises UserError if they do not fit into memory.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    allocate(decoder.to(dtype), device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in decoder.eval().requires_grad_(False).parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)  # these shapes have norms, but no biases
        else:
            parameter.normal_(0.0, DEVIATION, generator=generator)
    return decoder


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


def step_seconds(
    model: ModelConfig, contexts: list[int], tokens: int, itemsize: int, ceilings: Ceilings
) -> tuple[float, float]:
    """Return the seconds to load and the seconds to compute.

    Their sum is the time of a step that does not overlap them; the larger one is a lower bound for any kernel.
    """
    loading = step_bytes(model, contexts, tokens, itemsize) / ceilings.bytes_per_s
    return loading, step_flops(model, contexts, tokens) / ceilings.flops_per_s
