"""Compare random numbers of kernels and GPUs with those of PyTorch on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from engine.executor.kernels.dispatch import kernel
from engine.executor.kernels.sample import gumbel, gumbel_bound, key
from engine.sampling.noise import gumbel_noise, mix64, uniforms
from tests.engine.executor.kernels.conftest import on, require_interpreter

if TYPE_CHECKING:
    import triton.language as tl

ROWS, COLUMNS = 50, 1000


@kernel()
def fill(seeds, positions, noise, bounds, size, BLOCK: tl.constexpr):  # noqa: N803
    """Write keyed noise and its bounds, one row per seed and position."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    own = key(tl.load(seeds + row).to(tl.uint64), tl.load(positions + row))
    tl.store(noise + row * size + column, gumbel(own, column), mask=column < size)
    tl.store(bounds + row * size + column, gumbel_bound(own, column), mask=column < size)


def random_keys(count=2000):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator) for _ in range(2)]


def almost_equal(left, right):
    """Whether float32 numbers are equal, except for one in a million that differs in the last bits."""
    differ = left != right
    return differ.float().mean() < 1e-6 and torch.allclose(left, right, rtol=2**-22, atol=2**-30)


@pytest.mark.gpu
def test_noise_on_a_gpu_equals_noise_on_the_cpu():
    """Keys and uniforms are equal. Logarithms may differ in the last bit of float32."""
    seeds, positions = random_keys()
    device = on("cuda")
    there = seeds.to(device), positions.to(device)
    assert torch.equal(mix64(there[0]).cpu(), mix64(seeds))
    assert torch.equal(uniforms(*there, there[0]).cpu(), uniforms(seeds, positions, seeds))
    assert almost_equal(gumbel_noise(*there, 5000).cpu(), gumbel_noise(seeds, positions, 5000))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_noise_of_the_kernel_equals_that_of_pytorch_and_is_below_its_bound(device):
    if device == "cpu":
        require_interpreter()
    seeds, positions = (column[:ROWS].to(on(device)) for column in random_keys())
    noise, bounds = (torch.empty(ROWS, COLUMNS, device=device) for _ in range(2))
    fill[(ROWS,)](seeds, positions, noise, bounds, COLUMNS, 1024)
    assert almost_equal(noise.cpu(), gumbel_noise(seeds, positions, COLUMNS).cpu())
    above = bounds - noise
    assert (above > 0).all()
    assert above[bounds > 5].max() < 0.01
