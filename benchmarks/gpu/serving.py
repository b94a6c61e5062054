"""Serve requests with an engine at a fixed concurrency, and record steps, stage times and memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from benchmarks.gpu.requests import Item
from benchmarks.support.resources import forget_peak, peak_bytes
from drafter_service.observability.measuring.rounds import Timer
from engine.engine import Engine
from engine.scheduling.times import Stage, StageTimes


@dataclass(eq=False)
class Run:
    """One run of some requests."""

    outputs: list[np.ndarray]
    """uint32, in the order of the requests."""
    seconds: float = 0.0
    peak_bytes: int = 0
    """Peak memory of the process; on a GPU, peak GPU memory."""
    drafted: int = 0
    """Number of draft tokens."""
    deliveries: int = 0
    """Number of steps in which a sequence produced tokens, summed over the sequences."""
    launched_ahead: int = 0
    """Steps that were launched before the previous step's results were read."""
    steps: list[tuple[StageTimes, int]] = field(default_factory=list)
    """Stage times of every step, and the number of sequences that produced in it."""

    @property
    def tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(output) for output in self.outputs)

    @property
    def rate(self) -> float:
        """Output tokens per second of the whole run, prompts included."""
        return self.tokens / self.seconds

    def overhead(self, concurrency: int) -> float:
        """Return the median seconds of a step outside model and drafter, over full steps if there are any."""
        full = [times.overhead for times, sequences in self.steps if sequences == concurrency]
        return median(full or [times.overhead for times, _ in self.steps])

    def share(self, stage: Stage) -> float:
        """Return a stage's share of the time of all steps."""
        return sum(getattr(times, stage) for times, _ in self.steps) / sum(times.total for times, _ in self.steps)


def serve(engine: Engine, items: Sequence[Item], concurrency: int) -> Run:
    """Keep `concurrency` requests running in the given order, at most one per session."""
    gc.collect()
    forget_peak()
    waiting = list(range(len(items)))
    running: dict[int, int] = {}
    run = Run([np.empty(0, np.uint32) for _ in items])
    with Timer() as timer:
        while waiting or running:
            while len(running) < concurrency and (number := _next(items, waiting, running)) is not None:
                waiting.remove(number)
                running[engine.add(items[number].request)] = number
            report = engine.step()
            run.steps.append((report.times, report.produced))
            run.launched_ahead += report.is_ahead
            run.deliveries += report.produced
            run.drafted += len(report.arrays.drafted_sources)
            for sequence_id, completion in report.finished.items():
                run.outputs[running.pop(sequence_id)] = completion.tokens
    run.seconds, run.peak_bytes = timer.wall_s, peak_bytes()
    return run


def _next(items: Sequence[Item], waiting: Sequence[int], running: dict[int, int]) -> int | None:
    busy = {items[number].session for number in running.values()}
    return next((number for number in waiting if items[number].session not in busy), None)
