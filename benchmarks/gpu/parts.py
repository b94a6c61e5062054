"""The parts of the benchmark, each with its own time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.served import drafting, misfits, peers, replay
from benchmarks.gpu.single import ceilings, decode, start, streams, trees, verify


@dataclass(frozen=True)
class Part:
    """A question that the benchmark answers, and the function that measures it."""

    name: str
    title: str
    limit_s: int
    """Time limit, to which the time that earlier parts left is added; figures reported before it are kept."""
    run: Callable[[Bench], Iterator[Figure]]


PARTS = (
    Part("ceilings", "copy bandwidth and matrix products", 20, ceilings),
    Part("start", "capturing CUDA graphs for the most streams that are served", 30, start),
    Part("decode", "plain decoding of one stream, against the bandwidth; GPU idle between steps", 30, decode),
    Part("verify", "verifying 16 draft tokens, against a plain step", 35, verify),
    Part("trees", "a tree of 32 nodes at 32k tokens, against a path", 45, trees),
    Part("replay", "ssd against none on recorded traffic", 90, replay),
    Part("misfits", "drafts that never fit, against none", 40, misfits),
    Part("drafting", "CPU drafting on the GPU's timeline, embedded and remote", 40, drafting),
    Part("peers", "transformers' generate and prompt lookup, one stream", 35, peers),
    Part("streams", "64 streams without drafts, against the estimate", 25, streams),
)
"""390 seconds in all; with the tests that need a GPU, 9 minutes."""
