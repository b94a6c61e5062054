"""Seeds for several samples of one request. Does not import PyTorch, because the HTTP process uses it."""

from __future__ import annotations

MASK = (1 << 64) - 1
MULTIPLIER = 0xBF58476D1CE4E5B9
"""The first multiplier of SplitMix64's finalizer (Steele, Lea and Flood, 2014)."""


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request, in the range of `SamplingParams.seed`.

    The first sample uses the request's own seed, so it equals the output of the same request with one sample. The
    others use SplitMix64 of seed and index, so that requests with adjacent seeds share no samples.
    """
    if index == 0:
        return seed
    mixed = mix64(mix64(int(seed) & MASK) + index * MULTIPLIER & MASK)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def mix64(x: int) -> int:
    """Return SplitMix64's finalizer of an unsigned 64-bit number."""
    x = (x ^ x >> 30) * MULTIPLIER & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31
