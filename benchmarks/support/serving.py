"""Run requests with an engine at a fixed concurrency, and record latencies, stage times and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time

import numpy as np

from benchmarks.support.memory import forget_peak, peak_bytes
from benchmarks.support.requests import Item
from engine.engine import Engine
from engine.scheduling.times import StageTimes


@dataclass
class Clock:
    """Arrival times of the tokens of one request."""

    began: float
    """Time at which the request was added."""
    last: float = 0.0
    """Time at which the latest tokens arrived."""
    ttft: float = 0.0
    """Seconds to the first token."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens; tokens of one step share its duration."""
    deliveries: int = 0

    def record(self, tokens: int) -> None:
        """Record tokens that have just arrived."""
        now = perf_counter()
        if self.deliveries == 0:
            self.ttft = now - self.began
        else:
            self.gaps += [(now - self.last) / tokens] * tokens
        self.last = now
        self.deliveries += 1


@dataclass(eq=False)
class Run:
    """One run of all requests by one case."""

    seconds: float
    outputs: list[np.ndarray]
    """uint32, in the order of the requests."""
    clocks: list[Clock]
    peak_bytes: int
    """Peak memory of the process; on a GPU, peak GPU memory."""
    drafted: int | None = None
    """Number of draft tokens; None if the engine does not report it."""
    steps: list[tuple[StageTimes, int]] = field(default_factory=list)
    """Stage times of every step, and the number of sequences that produced in it."""
    cpu_seconds: float = 0.0
    """Processor time of all threads of the process, which other load disturbs less than `seconds`."""
    launched_ahead: int = 0
    """Steps that were launched before the previous step's results were read."""

    @property
    def tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(output) for output in self.outputs)

    @property
    def deliveries(self) -> int:
        """Number of verify steps, counted per sequence."""
        return sum(clock.deliveries for clock in self.clocks)


def serve(engine: Engine, items: Sequence[Item], concurrency: int, advance: Callable[[], None]) -> Run:
    """Keep `concurrency` requests running in the given order, at most one per session; call `advance` after each."""
    gc.collect()
    forget_peak()
    waiting = list(range(len(items)))
    running: dict[int, int] = {}
    clocks = [Clock(0.0) for _ in items]
    run = Run(0.0, [np.empty(0, np.uint32) for _ in items], clocks, 0, drafted=0)
    began, cpu_began = perf_counter(), process_time()
    while waiting or running:
        while len(running) < concurrency and (number := _next(items, waiting, running)) is not None:
            waiting.remove(number)
            clocks[number].began = perf_counter()
            running[engine.add(items[number].request)] = number
        report = engine.step()
        run.steps.append((report.times, len(report.results)))
        run.launched_ahead += report.is_ahead
        for result in report.results:
            clocks[running[result.sequence_id]].record(len(result.tokens))
        run.drafted = (run.drafted or 0) + sum(result.drafted for result in report.results)
        for sequence_id, completion in report.finished.items():
            run.outputs[running.pop(sequence_id)] = completion.tokens
            advance()
    run.seconds, run.cpu_seconds = perf_counter() - began, process_time() - cpu_began
    run.peak_bytes = peak_bytes()
    return run


def _next(items: Sequence[Item], waiting: Sequence[int], running: dict[int, int]) -> int | None:
    busy = {items[number].session for number in running.values()}
    return next((number for number in waiting if items[number].session not in busy), None)
