"""Models of well-known shapes with random weights: as fast as the originals, with meaningless outputs."""

from __future__ import annotations

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
