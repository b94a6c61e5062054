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
def installed(monkeypatch):
    monkeypatch.setattr("engine.attention.backend.has_flashinfer", lambda: True)
    monkeypatch.setattr("engine.attention.backend.flashinfer", lambda: None)


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    flashinfer.flashinfer.cache_clear()
    yield
    flashinfer.flashinfer.cache_clear()


@pytest.mark.parametrize(
    ("config", "dtype", "device", "expected"),
    [
        (CONFIG, torch.bfloat16, "cuda:0", "flashinfer"),
        (CONFIG, torch.float16, "cuda", "flashinfer"),
        (CONFIG, torch.float32, "cuda", "plain"),
        (CONFIG, torch.bfloat16, "cpu", "plain"),
        (NARROW, torch.bfloat16, "cuda", "plain"),
        (LATENT, torch.bfloat16, "cuda", "plain"),
    ],
)
def test_auto_selects_flashinfer_if_it_can_run(installed, config, dtype, device, expected):
    assert choose_backend("auto", config, dtype, device) == expected
    assert choose_backend("plain", config, dtype, device) == "plain"
    if expected == "flashinfer":
        assert choose_backend("flashinfer", config, dtype, device) == "flashinfer"


def test_auto_selects_plain_if_flashinfer_is_not_installed(monkeypatch):
    monkeypatch.setattr("engine.attention.backend.has_flashinfer", lambda: False)
    assert choose_backend("auto", CONFIG, torch.bfloat16, "cuda") == "plain"


@pytest.mark.parametrize(
    ("config", "dtype", "device", "words"),
    [
        (CONFIG, torch.bfloat16, "cpu", "--device cuda"),
        (CONFIG, torch.float32, "cuda", "--dtype bfloat16"),
        (NARROW, torch.bfloat16, "cuda", "heads of 16"),
        (LATENT, torch.bfloat16, "cuda", "runs no latent attention in this engine"),
    ],
)
def test_flashinfer_is_refused_with_a_reason_if_it_cannot_run(installed, config, dtype, device, words):
    with pytest.raises(UserError, match=words) as refusal:
        choose_backend("flashinfer", config, dtype, device)
    assert "\n" not in str(refusal.value)


def test_the_error_for_a_missing_library_says_how_to_install_it(missing):
    with pytest.raises(UserError, match=r"pip install '\.\[gpu\]'"):
        choose_backend("flashinfer", CONFIG, torch.bfloat16, "cuda")


def test_plain_attention_does_not_need_flashinfer(missing):
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
