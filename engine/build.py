"""From a model folder and settings to an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.attention.plain import PlainAttention
from engine.config import EngineConfig
from engine.core import Engine
from engine.detokenize import Decode
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.pages import PagePool
from engine.runner import Runner
from engine.sampler import Choose, choose
from ssd.draft import Drafter

ASSETS = Path(__file__).parent / "assets"
SHIPPED_MODEL = ASSETS / "stdlib-7m"
"""The small model that comes with the project."""
PROMPTS_FILE = "prompts.jsonl"
"""In its folder: held-out functions to complete."""


def build_engine(
    model: Decoder, config: EngineConfig, drafter: Drafter, decode: Decode | None = None, choose: Choose = choose
) -> Engine:
    """An engine for a loaded model. Engines may share a model; each has its own KV cache.

    `decode` is the tokenizer's, for requests with stop strings; `choose` makes tokens of logits.
    """
    dtype = model.embedding.weight.dtype
    device = str(model.embedding.weight.device)
    pages = PagePool(_page_count(model.config, config, dtype), config.page_size)
    attention = PlainAttention(model.config, pages.count, config.page_size, dtype, device)
    return Engine(model.config, config, Runner(model, attention, device), pages, drafter, decode, choose)


def _page_count(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Pages for the memory that was granted, or for as many full context windows as can run at once."""
    bytes_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
    granted = (config.kv_memory_mib << 20) // (bytes_per_token * config.page_size)
    usable = config.max_sequences * -(-model.max_positions // config.page_size)
    return min(granted, usable)
