"""A tiny target with text."""

from dataclasses import replace

import numpy as np
import torch

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.training.kinds import KINDS

WINDOW = 24
CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
    eos_token_ids=(0,),
)


def new_target(config=CONFIG):
    """A target whose distributions are neither flat nor one-hot."""
    torch.manual_seed(0)
    target = Decoder(config)
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1 if parameter.ndim == 1 else 0.4)
    return target.eval().requires_grad_(False)


def new_windows(count=12, seed=0):
    """Random text, uint32 [count, WINDOW]."""
    return np.random.default_rng(seed).integers(1, CONFIG.vocab_size, (count, WINDOW)).astype(np.uint32)


def tiny_recipe(kind, steps=12, **changes):
    """The kind's recipe for small batches of short windows."""
    changes = {"window": WINDOW, "batch_windows": 2, "draft_vocabulary": 30, "warmup_steps": 2, "depth": 3, **changes}
    return replace(KINDS[kind].recipe, total_tokens=steps * WINDOW * 2, **changes)
