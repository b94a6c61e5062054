"""A kernel that writes keyed random numbers, each row of its own seed and position."""

import triton
import triton.language as tl

from engine.executor.kernels.noise_triton import gumbel, gumbel_bound, key, uniform


@triton.jit
def fill(seeds, positions, noise, chances, size, shift, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    own = key(tl.load(seeds + row).to(tl.uint64), tl.load(positions + row))
    tl.store(noise + row * size + column, gumbel(own, column + shift), mask=column < size)
    tl.store(chances + row * size + column, uniform(own, column), mask=column < size)


@triton.jit
def fill_bounds(seeds, positions, bounds, size, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    own = key(tl.load(seeds + row).to(tl.uint64), tl.load(positions + row))
    tl.store(bounds + row * size + column, gumbel_bound(own, column), mask=column < size)
