"""One case of the benchmark: an engine on a device that answers at once, with one drafter and number of requests."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.bench import SHAPES, random_model
from benchmarks.gpu.requests import Item, learn
from benchmarks.host_time import MAX_DRAFT, MAX_POSITIONS, STAGES, Device, Steps, recorded_items, step_tokens
from drafter_service.observability.measuring.sidecar import running_sidecar
from engine.api.messages import RequestEnded, SubmitRequest
from engine.api.worker import Worker
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.drafters.tokens import adapt
from engine.engine import COMMON_SAMPLING, Engine
from engine.executor.build import build_executors
from engine.executor.fixed_step import INPUT_COLUMNS, RESULT_COLUMNS, FixedStep, Kind
from engine.executor.runner import Runner
from engine.executor.transfer import PendingArray
from engine.scheduling.plan import StepPlan
from engine.scheduling.report import StepReport
from engine.scheduling.request import Request
from engine.speculation.selection import DraftSelection
from ssd.budget.curve import StepCurve
from ssd.budget.roofline import roofline
from ssd.config import DrafterConfig
from ssd.kernels.jit import outline


@contextmanager
def instant_device(vocabulary: int) -> Iterator[Device]:
    """Replace the work of the device by recorded outputs, on a CPU. All tokens have the same logits."""
    device = Device()
    read = PendingArray.read

    def step(self: FixedStep, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
        with device.work(is_step=True):
            state = self._state
            columns = (self._table, state.lengths, state.limits, state.history)
            results = outcomes(*(column.numpy() for column in columns), self._shape.width)
            return torch.from_numpy(results), torch.zeros(1, 1).expand(kind.host_rows, vocabulary)

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


@outline
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
        size = plan.tokens, len(plan)
        if size not in self._known:
            self._known[size] = float(self._budget.curve.seconds(*size))
        seconds = self._known[size]
        super().record(plan, accepted, committed, seconds)


def run_case(drafter: str, at_once: int, options: argparse.Namespace) -> dict[str, float]:
    """Measure a drafter with a number of requests at once, and return the figures of `options.steps` steps.

    options: those of the command line.
    """
    learned, served, vocabulary = recorded_items(options.trace)
    if options.mixed:
        served = mixed(served)
    curve = StepCurve.from_profile(roofline(options.gpu, options.model_size))
    shape = replace(SHAPES["tiny"], vocab_size=vocabulary, num_layers=1, max_positions=MAX_POSITIONS)
    config = EngineConfig(
        max_sequences=at_once, max_step_tokens=step_tokens(at_once), kv_memory_mib=1024,
        max_draft=MAX_DRAFT, in_flight=1,
    )  # fmt: skip
    with ExitStack() as stack:
        is_remote = drafter == "ssd-remote"
        address = stack.enter_context(running_sidecar("--capacity", "4M")).address if is_remote else ""
        device = stack.enter_context(instant_device(vocabulary))
        inner = build_drafter(drafter, DrafterConfig(max_draft=MAX_DRAFT), address=address)
        if drafter != "none":
            learn(inner, learned)
        model = random_model(shape, torch.float32)
        executors = build_executors(model, config, "plain", COMMON_SAMPLING, lambda _: None, measure=False)
        engine = Engine(shape, config, executors, adapt(inner), None, KnownDurations(curve))
        steps, arrivals = Steps(device), cycle(served)
        # As the server does.
        gc.collect()
        gc.freeze()
        count = options.steps + options.steps // 4
        measured = partial(measured_step, engine.step, steps, device)
        if options.server:
            turns = serve_to_process(engine, measured, [item.request for item in served], at_once, count)
            beyond = np.array(turns) - np.array(steps.total[: len(turns)])
            figures = steps.figures(options.steps // 4, has_other=True)
            return {**figures, "beyond the loop": 1e3 * float(np.median(beyond[options.steps // 4 :]))}
        for _ in range(at_once):
            engine.add(next(arrivals).request)
        while len(steps) < count:
            for _ in measured().finished:
                engine.add(next(arrivals).request)
        return steps.figures(options.steps // 4, has_other=True)


def mixed(items: Sequence[Item]) -> list[Item]:
    """Return items of which one in 64 wants log-probabilities, and another one a bias."""
    wishes = {0: {"logprobs": 0}, 32: {"logit_bias": {1: 1.0}}}
    found = []
    for number, item in enumerate(items):
        sampling = replace(item.request.sampling, **wishes.get(number % 64, {}))
        found.append(item._replace(request=replace(item.request, sampling=sampling)))
    return found


def measured_step(step: Callable[[], StepReport], steps: Steps, device: Device) -> StepReport:
    """Run a step of an engine, and record its durations without those of the device."""
    began, before = time.perf_counter(), device.seconds
    report = step()
    device_s = device.seconds - before
    total = time.perf_counter() - began - device_s
    stages = {stage: getattr(report.times, stage) for stage in STAGES}
    stages["forward"] -= device_s
    steps.add(total, [*stages.values()], report.committed, report.produced)
    return report


def serve_to_process(
    engine: Engine, step: Callable[[], StepReport], requests: Sequence[Request], at_once: int, count: int
) -> list[float]:
    """Run `count` steps in the engine process of the HTTP server; return the seconds of each turn of its loop."""
    own, other = Pipe()
    # Not forked: threads of gRPC may hold locks.
    process = get_context("spawn").Process(target=submit_requests, args=(other, requests, at_once), daemon=True)
    process.start()
    other.close()
    turns: list[float] = []
    last = time.perf_counter()

    def timed_step() -> StepReport:
        nonlocal last
        report = step()
        now = time.perf_counter()
        turns.append(now - last)
        last = now
        if len(turns) >= count:
            raise EOFError
        return report

    engine.step = timed_step  # type: ignore[method-assign]
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
