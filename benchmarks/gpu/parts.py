"""The parts of the benchmark, each with its own time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.drafting import drafting
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.served import misfits, peers, replay
from benchmarks.gpu.single import ceilings, decode, streams, verify
from benchmarks.gpu.trees import trees


@dataclass(frozen=True)
class Part:
    """A question, and whoever answers it."""

    name: str
    title: str
    limit_s: int
    """After so long it is stopped, and what it has reported counts."""
    run: Callable[[Bench], Iterator[Figure]]


PARTS = (
    Part("ceilings", "copy bandwidth and matrix products", 30, ceilings),
    Part("decode", "plain decoding of one stream, against the bandwidth; GPU idle between steps", 50, decode),
    Part("verify", "verifying 16 draft tokens, against a plain step", 50, verify),
    Part("trees", "a tree of 32 nodes at 32k tokens, against a path and against a mask over everything", 70, trees),
    Part("replay", "ssd against none on recorded traffic", 130, replay),
    Part("misfits", "drafts that never fit, against none", 60, misfits),
    Part("drafting", "CPU drafting on the GPU's timeline, embedded and remote", 60, drafting),
    Part("peers", "transformers' generate and prompt lookup, one stream", 50, peers),
    Part("streams", "64 streams without drafts, against the estimate", 40, streams),
)
"""540 seconds in all."""
