"""A kernel that writes keyed noise and its bounds, one row per seed and position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.executor.kernels.dispatch import kernel
from engine.executor.kernels.sample import gumbel, gumbel_bound, key

if TYPE_CHECKING:
    import triton.language as tl


@kernel()
def fill(seeds, positions, noise, bounds, size, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    own = key(tl.load(seeds + row).to(tl.uint64), tl.load(positions + row))
    tl.store(noise + row * size + column, gumbel(own, column), mask=column < size)
    tl.store(bounds + row * size + column, gumbel_bound(own, column), mask=column < size)
