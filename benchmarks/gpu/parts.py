"""The parts of the benchmark, each with a time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.serving_parts import drafting, rejected, replay
from benchmarks.gpu.step_parts import ceilings, decode, start, streams, trees, verify


@dataclass(frozen=True)
class Part:
    """A question that the benchmark answers, and the function that measures it."""

    name: str
    title: str
    limit_s: int
    """Time limit, extended by the time that earlier parts did not use; figures reported before it are kept."""
    run: Callable[[Bench], Iterator[Figure]]


PARTS = (
    Part("ceilings", "copy bandwidth and matrix products", 20, ceilings),
    Part("start", "capturing CUDA graphs for the most streams that are served", 30, start),
    Part("decode", "plain decoding of one stream, against the bandwidth; GPU idle between steps", 30, decode),
    Part("verify", "verifying 16 draft tokens, against a plain step", 35, verify),
    Part("trees", "a tree of 32 nodes at 32k tokens, against a path", 45, trees),
    Part("replay", "ssd against none on recorded traffic", 90, replay),
    Part("rejected", "drafts that are always rejected, against none", 40, rejected),
    Part("drafting", "CPU drafting on the GPU's timeline, embedded and remote", 40, drafting),
    Part("streams", "64 streams without drafts, against the estimate", 25, streams),
)
"""Parts in the order in which they run: 355 seconds in total, 9 minutes with the tests that need a GPU."""
