"""Conversion of keys and values to a cache's dtype, and copies between its slots."""

import numpy as np
import pytest
import torch

from engine.attention.cache import PagedCache, as_stored
from engine.models.config import ModelConfig


def test_numbers_beyond_the_range_of_8_bits_are_clamped():
    heads = torch.tensor([1e9, -500.0, 1.06, 0.0])
    assert as_stored(heads, torch.float8_e4m3fn).float().tolist() == [448, -448, 1.0, 0]
    assert torch.equal(as_stored(heads, torch.float32), heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_move_reads_all_slots_before_it_writes(dtype):
    config = ModelConfig(9, 8, 8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, max_positions=64)
    cache = PagedCache(config, 4, 8, dtype, "cpu")
    assert cache.layers.shape == (2, 4, 2, 8, 2, 4)
    cache.layers.copy_(torch.randn(cache.layers.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.layers.float().clone()
    sources, targets = np.array([9, 10, 31, 2]), np.array([8, 9, 10, 30])
    cache.move(sources, targets)
    expected = before.clone()
    for source, target in zip(sources, targets, strict=True):
        expected[:, target // 8, :, target % 8] = before[:, source // 8, :, source % 8]
    assert torch.equal(cache.layers.float(), expected)
    assert not torch.equal(expected, before)
