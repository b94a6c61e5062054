"""Idle times of a GPU and the share of each kernel, from the profiler's events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIN_GAP_US = 5.0
"""Smallest gap between steps. Gaps between kernels of one step are shorter: 1 to 2 us within a CUDA graph."""
NOT_WORK = ("Memcpy", "Memset")
"""Prefixes of the profiler's names of copies, during which the multiprocessors are idle."""


@dataclass(frozen=True, order=True)
class Interval:
    """Start and end of a kernel, in microseconds."""

    begin: float
    end: float
    name: str = ""


def gaps(kernels: Sequence[Interval]) -> list[float]:
    """Return the gaps, in microseconds, in which no kernel ran; kernels may overlap, in any order."""
    found, busy_until = [], None
    for kernel in sorted(kernels):
        if busy_until is not None and kernel.begin > busy_until:
            found.append(kernel.begin - busy_until)
        busy_until = kernel.end if busy_until is None else max(busy_until, kernel.end)
    return found


def span(kernels: Sequence[Interval]) -> float:
    """Return the microseconds from the start of the first kernel to the end of the last one."""
    return max(kernel.end for kernel in kernels) - min(kernel.begin for kernel in kernels) if kernels else 0.0


def idle_share(kernels: Sequence[Interval], min_gap: float = 0.0) -> float:
    """Return the share of time, 0 to 1, in gaps of at least `min_gap` us. Raises ValueError without kernels."""
    if not span(kernels):
        raise ValueError("no kernel ran, so there is no time to take a share of")
    return sum(gap for gap in gaps(kernels) if gap >= min_gap) / span(kernels)


def by_name(kernels: Sequence[Interval], count: int = 12) -> list[tuple[str, float]]:
    """Return the `count` kernels with the largest shares of the kernels' time, and the shares."""
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[kernel.name] += kernel.end - kernel.begin
    total = sum(sums.values())
    ranked = sorted(sums.items(), key=lambda item: -item[1])[:count]
    return [(name[:80], round(time / total, 4)) for name, time in ranked]


def record(run: Callable[[], object]) -> list[Interval]:
    """Return the kernels that ran on the GPU during `run`."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    return [
        Interval(event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3, event.name())
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith(NOT_WORK)
    ]
