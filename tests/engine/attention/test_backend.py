"""Choice of the backend, and the cache of paged kernels."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention import flashinfer
from engine.attention.backend import choose_backend, make_attention, make_ops
from engine.attention.calls import PagedCache
from engine.attention.plain import PlainAttention
from engine.commands.launch import find_device, find_dtype
from engine.models.config import LatentConfig, ModelConfig
from engine.models.layers import PLAIN
from ssd.errors import UserError

CONFIG = ModelConfig(9, 64, 8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64, max_positions=64)
NARROW = replace(CONFIG, head_dim=16)
LATENT = replace(CONFIG, latent=LatentConfig(query_rank=0, latent_dim=32, nope_dim=8, value_dim=8))


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    flashinfer.flashinfer.cache_clear()
    yield
    flashinfer.flashinfer.cache_clear()


@pytest.mark.parametrize(
    ("config", "dtype", "device", "obstacle"),
    [
        (CONFIG, torch.bfloat16, "cuda:0", None),
        (CONFIG, torch.float16, "cuda", None),
        (CONFIG, torch.float32, "cuda", "--dtype bfloat16"),
        (CONFIG, torch.bfloat16, "cpu", "--device cuda"),
        (NARROW, torch.bfloat16, "cuda", "heads of 16"),
        (LATENT, torch.bfloat16, "cuda", "runs no latent attention in this engine"),
    ],
)
def test_flashinfer_is_selected_if_it_can_run_or_refused_with_a_reason(monkeypatch, config, dtype, device, obstacle):
    monkeypatch.setattr("engine.attention.backend.flashinfer", lambda: None)
    for is_installed in (True, False):
        monkeypatch.setattr("engine.attention.backend.has_flashinfer", lambda: is_installed)  # noqa: B023
        expected = "flashinfer" if is_installed and obstacle is None else "plain"
        assert choose_backend("auto", config, dtype, device) == expected
    assert choose_backend("plain", config, dtype, device) == "plain"
    if obstacle is None:
        assert choose_backend("flashinfer", config, dtype, device) == "flashinfer"
    else:
        with pytest.raises(UserError, match=obstacle):
            choose_backend("flashinfer", config, dtype, device)


def test_without_the_library_plain_attention_runs_and_the_error_says_how_to_install_it(missing):
    with pytest.raises(UserError, match=r"pip install '\.\[gpu\]'"):
        choose_backend("flashinfer", CONFIG, torch.bfloat16, "cuda")
    assert isinstance(make_attention("plain", CONFIG, 2, 16, torch.float32, "cpu"), PlainAttention)
    assert make_ops("plain") is PLAIN


def test_devices_and_dtypes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == "cpu"
    assert find_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("auto") == "cuda"
    assert find_dtype("auto", "cpu") == torch.float32
    assert find_dtype("auto", "cuda:1") == torch.bfloat16
    assert find_dtype("float16", "cpu") == torch.float16


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta:x", "meta", "hpu"])
def test_missing_devices_are_refused(device):
    with pytest.raises(UserError, match="--device"):
        find_device(device)


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
