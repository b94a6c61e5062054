"""One case of the benchmark: an engine on a device that answers at once, with one drafter and number of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numba
import numpy as np
import torch

from benchmarks.gpu.requests import Item, Limits, replay_items
from benchmarks.gpu.shapes import SHAPES, random_model
from benchmarks.traces import load_trace
from drafter_service.observability.measuring.sidecar import running_sidecar
from engine.api.messages import RequestEnded, SubmitRequest
from engine.api.worker import Worker
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.drafters.tokens import adapt
from engine.engine import COMMON_SAMPLING, Engine, StepReport
from engine.executor.build import build_executors
from engine.executor.fixed_step import INPUT_COLUMNS, RESULT_COLUMNS, FixedStep, Kind
from engine.executor.runner import Runner
from engine.executor.transfer import PendingArray
from engine.scheduling.plan import StepPlan
from engine.scheduling.request import Request
from engine.speculation.selection import DraftSelection
from ssd.budget.curve import StepCurve
from ssd.budget.roofline import roofline
from ssd.config import DrafterConfig

MAX_DRAFT = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 5000, 128
LEARNED = 400
"""Number of requests that the drafter has learned before."""
STAGES = ("schedule", "draft", "forward", "verify", "commit")


@dataclass
class Device:
    """A device that answers at once. Counts its own time, and that during which a GPU would have waited."""

    seconds: float = 0.0
    """Time taken to stand in for the device, which is not the engine's."""
    critical: list[float] = field(default_factory=list)
    """Seconds from the results of a step to the launch of the next one, where none was in flight."""
    in_flight: int = 0
    read_at: float | None = None

    @contextmanager
    def work(self, *, is_step: bool) -> Iterator[None]:
        """Measure a launch; is_step: whether its results are read."""
        began = time.perf_counter()
        if self.read_at is not None:
            self.critical.append(began - self.read_at)
            self.read_at = None
        self.in_flight += is_step
        yield
        self.seconds += time.perf_counter() - began

    def read(self) -> None:
        """Note that the results of the oldest step have been read."""
        self.in_flight -= 1
        self.read_at = None if self.in_flight else time.perf_counter()


@contextmanager
def instant_device() -> Iterator[Device]:
    """Replace the work of the device by recorded outputs, on a CPU."""
    device = Device()
    read = PendingArray.read

    def step(self: FixedStep, _kind: Kind) -> torch.Tensor:
        with device.work(is_step=True):
            state = self._state
            columns = (self._table, state.lengths, state.limits, state.history)
            return torch.from_numpy(outcomes(*(column.numpy() for column in columns), self._shape.width))

    def forward(_self: Runner, batch: Any) -> torch.Tensor:
        with device.work(is_step=False):
            return torch.zeros(len(batch.logit_rows), 1)

    def read_results(self: PendingArray) -> np.ndarray:
        rows = read(self)
        device.read()
        return rows

    with ExitStack() as stack:
        for owner, name, new in (
            (FixedStep, "_step", step), (Runner, "forward", forward), (PendingArray, "read", read_results)
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, new))
        yield device


@numba.njit(cache=True)
def outcomes(table, lengths, limits, history, width):
    """Return the results of a step, int32 [B, RESULT_COLUMNS + width], and commit them to the state.

    Arguments as in `HostInputs` and `DeviceState`; the history has the rest of each recorded output.
    """
    results = np.zeros((len(table), RESULT_COLUMNS + width), np.int32)
    for row in range(len(table)):
        slot = table[row, 0]
        length, room = lengths[slot], limits[slot] - lengths[slot]
        if room <= 0:
            continue
        drafted = min(table[row, 1] - 1, room - 1)
        accepted = 0
        while accepted < drafted and table[row, INPUT_COLUMNS + accepted] == history[slot, length + accepted]:
            accepted += 1
        results[row, 0], results[row, 1] = accepted + 1, drafted
        results[row, RESULT_COLUMNS : RESULT_COLUMNS + accepted + 1] = history[slot, length : length + accepted + 1]
        lengths[slot] = length + accepted + 1
    return results


class KnownDurations(DraftSelection):
    """Selects drafts for steps that take as long as the curve says, whatever the clock says."""

    def __init__(self, curve: StepCurve) -> None:
        super().__init__(curve)
        self._known: dict[tuple[int, int], float] = {}

    def record(self, plan: StepPlan, accepted: int, committed: int, seconds: float) -> None:
        """Record a step as in `DraftSelection`."""
        # The durations of an unchanged curve are computed once.
        size = plan.tokens, len(plan.entries)
        if size not in self._known:
            self._known[size] = float(self._budget.curve.seconds(*size))
        seconds = self._known[size]
        super().record(plan, accepted, committed, seconds)


def build(
    drafter: str, at_once: int, learned: Sequence[Item], items: Sequence[Item], curve: StepCurve, address: str
) -> Engine:
    """Return an engine for `items` whose drafter has learned some of them."""
    vocabulary = 1 + max(int(part.max()) for item in items for part in (item.request.prompt, item.request.recorded))
    shape = replace(SHAPES["tiny"], vocab_size=vocabulary, num_layers=1, max_positions=8192)
    config = EngineConfig(
        max_sequences=at_once, max_step_tokens=at_once * (1 + MAX_DRAFT) + 4096, kv_memory_mib=1024,
        max_draft=MAX_DRAFT, in_flight=1,
    )  # fmt: skip
    inner = build_drafter(drafter, DrafterConfig(max_draft=MAX_DRAFT), address=address)
    for number, item in enumerate(learned, 1 << 32):
        if drafter != "none":
            inner.start(number, item.request.prompt)
            inner.finish(number, item.request.recorded)
    executors = build_executors(
        random_model(shape, torch.float32), config, "plain", COMMON_SAMPLING, lambda _: None, measure=False
    )
    return Engine(shape, config, executors, adapt(inner), None, KnownDurations(curve))


class Steps:
    """Durations of the engine's steps in seconds, without those of the device."""

    def __init__(self, engine: Engine, device: Device) -> None:
        self.total: list[float] = []
        self.stages: list[list[float]] = []
        self.committed = self.produced = 0
        self._step, self._device = engine.step, device
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> StepReport:
        """Run and measure a step."""
        began, before = time.perf_counter(), self._device.seconds
        report = self._step()
        self.total.append(time.perf_counter() - began - (self._device.seconds - before))
        stages = {stage: getattr(report.times, stage) for stage in STAGES}
        stages["forward"] -= self._device.seconds - before
        self.stages.append(list(stages.values()))
        self.committed += report.committed
        self.produced += len(report.results)
        return report

    def figures(self, device: Device, first: int) -> dict[str, float]:
        """Return the figures of all steps from the first one on, in milliseconds."""
        total, stages = 1e3 * np.array(self.total[first:]), 1e3 * np.array(self.stages[first:])
        return {
            "median": float(np.median(total)),
            "p90": float(np.percentile(total, 90)),
            "mean": float(total.mean()),
            "critical": 1e3 * float(np.median(device.critical)) if device.critical else 0.0,
            **dict(zip(STAGES, np.median(stages, axis=0).tolist(), strict=True)),
            "other": float(np.median(total - stages.sum(axis=1))),
            "tokens per step": self.committed / max(1, self.produced),
        }


def serve(engine: Engine, items: Sequence[Item], at_once: int, steps: Steps, count: int) -> None:
    """Run `count` steps in the engine's process, with `at_once` requests."""
    arrivals = cycle(items)
    for _ in range(at_once):
        engine.add(next(arrivals).request)
    while len(steps.total) < count:
        report = engine.step()
        for _ in report.finished:
            engine.add(next(arrivals).request)


def serve_to_process(engine: Engine, items: Sequence[Item], at_once: int, count: int) -> list[float]:
    """Do as `serve` in the engine process of the HTTP server; return the seconds of each turn of its loop."""
    own, other = Pipe()
    requests = [item.request for item in items]
    # Not forked: threads of gRPC may hold locks.
    process = get_context("spawn").Process(target=submit_requests, args=(other, requests, at_once), daemon=True)
    process.start()
    other.close()
    turns: list[float] = []
    measured, last = engine.step, time.perf_counter()

    def step() -> StepReport:
        nonlocal last
        report = measured()
        now = time.perf_counter()
        turns.append(now - last)
        last = now
        if len(turns) >= count:
            raise EOFError
        return report

    engine.step = step  # type: ignore[method-assign]
    with suppress(EOFError):
        Worker(engine, own).run()
    process.kill()
    process.join()
    return turns


def submit_requests(connection: Connection, requests: Sequence[Request], at_once: int) -> None:
    """Submit requests as others end, in place of the HTTP process."""
    arrivals = enumerate(cycle(requests))
    with suppress(EOFError, OSError):
        connection.recv()
        for _ in range(at_once):
            connection.send(SubmitRequest(*next(arrivals)))
        while True:
            for event in connection.recv():
                if isinstance(event, RequestEnded):
                    connection.send(SubmitRequest(*next(arrivals)))


def run_case(
    drafter: str, at_once: int, path: Path, measured: int, gpu: str, model_size: str, *, has_server: bool
) -> dict[str, float]:
    """Measure a drafter with a number of requests at once, and return the figures of `measured` steps.

    path: recorded traffic. gpu, model_size: as in `roofline`. has_server: whether the engine process of the HTTP server
    runs the engine.
    """
    trace = load_trace(path)
    short = replace(trace, requests=[each for each in trace.requests if len(each.prompt) <= PROMPT_TOKENS])
    items = replay_items(
        short, len(short.requests), Limits(PROMPT_TOKENS, OUTPUT_TOKENS), replace(SHAPES["tiny"], vocab_size=1 << 18)
    )
    learned, served = items[: min(LEARNED, len(items) // 2)], items[min(LEARNED, len(items) // 2) :]
    curve = StepCurve.from_profile(roofline(gpu, model_size))
    with ExitStack() as stack:
        remote = drafter == "ssd-remote"
        address = stack.enter_context(running_sidecar("--capacity", "4M")).address if remote else ""
        device = stack.enter_context(instant_device())
        engine = build(drafter, at_once, learned, items, curve, address)
        steps = Steps(engine, device)
        first, count = measured // 4, measured + measured // 4
        if not has_server:
            serve(engine, served, at_once, steps, count)
            return steps.figures(device, first)
        turns = serve_to_process(engine, served, at_once, count)
        beyond = 1e3 * (np.array(turns[first:]) - np.array(steps.total[first : len(turns)]))
        return {**steps.figures(device, first), "beyond the loop": float(np.median(beyond))}
