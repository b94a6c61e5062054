"""Simulated engines: how long the steps of a replay take, and what a drafter is told about them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ssd.budget.padding import NO_PADDING, Padding
from ssd.types import StepTime

if TYPE_CHECKING:
    from ssd.budget.curve import StepCurve

GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Numbers of tokens that vLLM captures CUDA graphs for by default."""
PADDED_LENGTHS = (0, 1, 2, 4, 8, 16, 32)
NOISE, OUTLIERS, OUTLIER_FACTOR = 0.1, 0.01, 5.0
"""Relative standard deviation of reported times; share of times that other load makes longer, and their factor."""


class Step(NamedTuple):
    """What decides how long a step takes."""

    sequences: int
    drafted: int
    """Number of draft tokens of all sequences."""
    longest: int
    """Number of draft tokens of the sequence with the most."""
    committed: int


class SimulatedEngine(NamedTuple):
    """Hardware and a model whose steps have known durations."""

    name: str
    gpu: str
    model_size: str
    padding: Padding = NO_PADDING
    is_slowing: bool = False
    """Whether its steps take twice as long after half of the output."""

    def curve(self) -> StepCurve:
        """Return the durations of its steps, at first."""
        from ssd.budget.curve import StepCurve
        from ssd.budget.roofline import roofline

        return StepCurve.from_profile(roofline(self.gpu, self.model_size), self.padding)


ENGINES = (
    SimulatedEngine("H100, 8B", "h100", "8b"),
    SimulatedEngine("H200, 70B", "h200", "70b"),
    SimulatedEngine("L4, 8B", "l4", "8b"),
    SimulatedEngine("H100, 8B, CUDA graphs", "h100", "8b", Padding(sizes=GRAPH_SIZES)),
    SimulatedEngine("H100, 8B, padded to K", "h100", "8b", Padding(lengths=PADDED_LENGTHS)),
    SimulatedEngine("H100, 8B, slowing by 2x", "h100", "8b", is_slowing=True),
)


class Clock:
    """The durations of the steps of one replay."""

    def __init__(self, engine: SimulatedEngine, output_tokens: int) -> None:
        curve = engine.curve()
        self._duration = functools.cache(lambda tokens, sequences: float(curve.seconds(tokens, sequences)))
        self._lengths = np.array(engine.padding.lengths)
        self._slow_after = output_tokens / 2 if engine.is_slowing else np.inf
        self._committed = 0
        self.seconds = 0.0
        """Sum over all steps so far."""

    def run(self, step: Step) -> StepTime:
        """Run a step, and return its duration."""
        tokens = step.sequences + step.drafted
        if len(self._lengths):
            padded = self._lengths[self._lengths >= step.longest]
            tokens = step.sequences * (1 + int(padded[0] if len(padded) else step.longest))
        seconds = self._duration(tokens, step.sequences) * (2 if self._committed > self._slow_after else 1)
        self._committed += step.committed
        self.seconds += seconds
        return StepTime(tokens, step.sequences, seconds)


def total_seconds(engine: SimulatedEngine, steps: Sequence[Step], output_tokens: int) -> float:
    """Return the duration of all steps of a replay of `output_tokens` tokens."""
    clock = Clock(engine, output_tokens)
    for step in steps:
        clock.run(step)
    return clock.seconds


def disturbed(time: StepTime, rng: np.random.Generator) -> StepTime:
    """Return a duration as an engine on a busy machine would report it."""
    factor = max(0.01, 1 + NOISE * rng.standard_normal()) * (OUTLIER_FACTOR if rng.random() < OUTLIERS else 1.0)
    return time._replace(seconds=time.seconds * factor)
