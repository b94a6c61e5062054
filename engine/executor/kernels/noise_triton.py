"""Random numbers of `engine.sampling.noise` in Triton: the same bits, except for the last bit of logarithms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.executor.kernels.dispatch import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel()
def mix64(x):
    """Return SplitMix64's finalizer of x, uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@kernel()
def _stepped(x, count):
    """Return SplitMix64's state `count` increments after x, uint64."""
    return x + count.to(tl.uint64) * 0x9E3779B97F4A7C15


@kernel()
def key(seed, position):
    """Return the key that all numbers of a seed and position share, uint64."""
    return mix64(_stepped(mix64(seed), position))


@kernel()
def _number(key, index):
    """Return a random uint32."""
    return (mix64(_stepped(key, index + 1)) >> 32).to(tl.uint32)


@kernel()
def gumbel(key, index):
    """Return standard Gumbel noise, float32."""
    uniform = (_number(key, index).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    # 1 - uniform has 33 bits, so it is exact, and its logarithm as precise as log1p's.
    return (-tl.log(-tl.log(1.0 - uniform))).to(tl.float32)


@kernel()
def gumbel_bound(key, index):
    """Return an upper bound of `gumbel`, float32, computed without float64 and close to it where the noise is large."""
    # -log(1 - u) >= u. The constant is far larger than the errors of float32, and small compared with the noise.
    return 1e-4 - tl.log((_number(key, index).to(tl.float32) + 0.5) * (1.0 / 4294967296.0))
