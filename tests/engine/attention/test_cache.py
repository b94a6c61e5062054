"""Copies between slots of a paged cache."""

import numpy as np
import torch

from engine.attention.cache import PagedCache
from engine.models.config import ModelConfig


def test_move_reads_all_slots_before_it_writes():
    config = ModelConfig(9, 8, 8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, max_positions=64)
    cache = PagedCache(config, 4, 8, torch.float32, "cpu")
    assert cache.layers.shape == (2, 4, 2, 8, 2, 4)
    cache.layers.copy_(torch.randn(cache.layers.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.layers.clone()
    sources, targets = np.array([9, 10, 31, 2]), np.array([8, 9, 10, 30])
    cache.move(sources, targets)
    expected = before.clone()
    for source, target in zip(sources, targets, strict=True):
        expected[:, target // 8, :, target % 8] = before[:, source // 8, :, source % 8]
    assert torch.equal(cache.layers, expected)
    assert not torch.equal(expected, before)
