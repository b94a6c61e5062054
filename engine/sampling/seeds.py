"""Seeds of the samples of one request. Knows nothing of PyTorch: whoever takes requests needs them, too."""

from __future__ import annotations

MASK = (1 << 64) - 1
MULTIPLIER = 0xBF58476D1CE4E5B9
"""The first of SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""


def sample_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th of several samples of one request, itself a seed as `SamplingParams` takes it.

    The first sample has the request's own seed, so it is what the request gives when it is asked for one sample. The
    others are SplitMix64 of the seed and the index, so neighbouring seeds do not share samples.
    """
    if index == 0:
        return seed
    mixed = mix64(mix64(int(seed) & MASK) + index * MULTIPLIER & MASK)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def mix64(x: int) -> int:
    """The finaliser of SplitMix64, of an unsigned number of 64 bits."""
    x = (x ^ x >> 30) * MULTIPLIER & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31
