"""`engine.sampling.noise`'s random numbers in Triton: the same bits, but for the last one of a logarithm."""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix64(x):
    """The finaliser of SplitMix64, uint64."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def key(seed, position):
    """What the numbers of a position have in common, uint64."""
    return mix64(mix64(seed) + position.to(tl.uint64) * GOLDEN)


@triton.jit
def _number(key, index):
    """A random uint32."""
    return (mix64(key + (index + 1).to(tl.uint64) * GOLDEN) >> 32).to(tl.uint32)


@triton.jit
def uniform(key, index):
    """Uniform numbers strictly between 0 and 1, float64, of a key and indices."""
    return (_number(key, index).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)


@triton.jit
def gumbel(key, index):
    """Standard Gumbel noise, float32."""
    # 1 - u has 33 bits, so it is exact, and its logarithm as precise as log1p's.
    return (-tl.log(-tl.log(1.0 - uniform(key, index)))).to(tl.float32)


@triton.jit
def gumbel_bound(key, index):
    """No less than `gumbel` of the same, float32, and hardly more where that is large; it takes no float64."""
    # -log(1 - u) >= u. What is added is far more than float32's errors here, and far less than noises differ by.
    return 1e-4 - tl.log((_number(key, index).to(tl.float32) + 0.5) * (1.0 / 4294967296.0))
