"""One case of the benchmark: an engine on a device that answers at once, with one drafter and number of requests."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.bench import SHAPES, random_model
from benchmarks.gpu.requests import learn
from benchmarks.host_time import MAX_DRAFT, MAX_POSITIONS, STAGES, Device, Steps, recorded_items, step_tokens
from drafter_service.observability.measuring.sidecar import running_sidecar
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.drafters.tokens import adapt
from engine.engine import COMMON_SAMPLING, Engine
from engine.executor.build import build_executors
from engine.executor.fixed_step import INPUT_COLUMNS, RESULT_COLUMNS, FixedStep, Kind
from engine.executor.runner import Runner
from engine.executor.transfer import PendingArray
from engine.scheduling.plan import StepPlan
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
        for _ in range(at_once):
            engine.add(next(arrivals).request)
        while len(steps) < options.steps + options.steps // 4:
            began, before = time.perf_counter(), device.seconds
            report = engine.step()
            device_s = device.seconds - before
            total = time.perf_counter() - began - device_s
            stages = {stage: getattr(report.times, stage) for stage in STAGES}
            stages["forward"] -= device_s
            steps.add(total, [*stages.values()], report.committed, report.produced)
            for _ in report.finished:
                engine.add(next(arrivals).request)
        return steps.figures(options.steps // 4, has_other=True)
