"""One case of the benchmark: an engine on a device that answers at once, with one drafter and number of requests."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.bench import SHAPES, random_model
from benchmarks.gpu.requests import Item, learn, replay_items
from drafter_service.observability.measuring.sidecar import running_sidecar
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.drafters.tokens import adapt
from engine.engine import COMMON_SAMPLING, Engine
from engine.executor.build import build_executors
from engine.executor.fixed_step import FixedStep, Kind
from engine.executor.runner import Runner
from engine.executor.transfer import PendingArray
from engine.scheduling.kernels import FIRST_DRAFT, FIRST_TOKEN
from engine.scheduling.plan import StepPlan
from engine.scheduling.report import StepReport
from engine.speculation.selection import DraftSelection
from ssd.budget.curve import StepCurve
from ssd.budget.roofline import roofline
from ssd.config import DrafterConfig
from ssd.kernels.jit import outline
from ssd.replay import Recording

MAX_DRAFT = 16
MAX_POSITIONS = 8192
PROMPT_TOKENS, OUTPUT_TOKENS = 5000, 128
MAX_TOKEN_ID = 1 << 18
SHIFT, VARIANTS = 1009, 8
"""Number of versions of each request that is served, so that none repeats an earlier one, and difference of token ids
from one to the next.
"""
LEARNED = 400
"""Number of requests that the drafter has learned before."""
STAGES = ("schedule", "draft", "forward", "verify", "commit")


def run_case(drafter: str, at_once: int, options: argparse.Namespace) -> dict[str, float]:
    """Measure a drafter with a number of requests at once, and return the figures of `options.steps` steps.

    options: those of the command line.
    """
    learned, served, vocabulary = recorded_items(options.trace)
    if options.mixed:
        served = mixed(served)
    curve = roofline(options.gpu, options.model_size).curve()
    shape = replace(SHAPES["tiny"], vocab_size=vocabulary, num_layers=1, max_positions=MAX_POSITIONS)
    config = EngineConfig(
        max_sequences=at_once, max_step_tokens=at_once * (1 + MAX_DRAFT) + 4096, kv_memory_mib=1024,
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
        steps, arrivals = Steps(), cycle(served)
        # As the server does.
        gc.collect()
        gc.freeze()
        for _ in range(at_once):
            engine.add(next(arrivals).request)
        while len(steps.total) < options.steps + options.steps // 4:
            for _ in measured_step(engine, steps, device).finished:
                engine.add(next(arrivals).request)
        return steps.figures(options.steps // 4, device)


def recorded_items(path: Path) -> tuple[list[Item], list[Item], int]:
    """Return the requests that a drafter has learned, those that are served, and the size of their vocabulary.

    After all recorded ones, each is served again with other tokens: token ids are shifted.
    """
    trace = Recording.load(path)
    short = trace.take(np.flatnonzero(trace.prompt_lengths <= PROMPT_TOKENS))
    items, _ = replay_items(short, PROMPT_TOKENS, OUTPUT_TOKENS, MAX_TOKEN_ID)
    vocabulary = 1 + max(int(part.max()) for item in items for part in item.texts)
    learned = min(LEARNED, len(items) // 2)

    def shifted(item: Item, by: int) -> Item:
        prompt, recorded = ((part + np.uint32(by)) % np.uint32(vocabulary) for part in item.texts)
        return item._replace(request=replace(item.request, prompt=prompt, recorded=recorded))

    served = [shifted(item, SHIFT * number) for number in range(VARIANTS) for item in items[learned:]]
    return items[:learned], served, vocabulary


def mixed(items: Sequence[Item]) -> list[Item]:
    """Return items of which one in 64 wants log-probabilities, and another one a bias."""
    wishes: dict[int, dict[str, Any]] = {0: {"logprobs": 0}, 32: {"logit_bias": {1: 1.0}}}
    return [item.with_sampling(**wishes.get(number % 64, {})) for number, item in enumerate(items)]


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


class Device:
    """A device that answers at once. Counts its own time, and that during which a GPU would have waited."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Time taken to stand in for the device, which is not the engine's."""
        self.critical: list[float] = []
        """Seconds from the results of a step to the launch of the next one, where none was in flight."""
        self._in_flight = 0
        self._read_at: float | None = None

    @contextmanager
    def work(self, *, is_step: bool) -> Iterator[None]:
        """Measure a launch; is_step: whether its results are read."""
        began = time.perf_counter()
        if self._read_at is not None:
            self.critical.append(began - self._read_at)
            self._read_at = None
        self._in_flight += is_step
        yield
        self.seconds += time.perf_counter() - began

    def read(self) -> None:
        """Note that the results of the oldest step have been read."""
        self._in_flight -= 1
        self._read_at = None if self._in_flight else time.perf_counter()


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
    """Return the results of a step, int32 [B, FIRST_TOKEN + width], and commit them to the state.

    Arguments as in `HostInputs` and `DeviceState`; the history has the rest of each recorded output.
    """
    results = np.zeros((len(table), FIRST_TOKEN + width), np.int32)
    for row in range(len(table)):
        slot = table[row, 0]
        length, room = lengths[slot], limits[slot] - lengths[slot]
        if room <= 0:
            continue
        drafted = min(table[row, 1] - 1, room - 1)
        accepted = 0
        while accepted < drafted and table[row, FIRST_DRAFT + accepted] == history[slot, length + accepted]:
            accepted += 1
        results[row, 0], results[row, 1] = accepted + 1, drafted
        results[row, FIRST_TOKEN : FIRST_TOKEN + accepted + 1] = history[slot, length : length + accepted + 1]
        lengths[slot] = length + accepted + 1
    return results


class Steps:
    """Durations of an engine's steps in seconds, without those of the device."""

    def __init__(self) -> None:
        self.total: list[float] = []
        self.stages: list[list[float]] = []
        """Durations of `STAGES`."""
        self.committed = self.produced = 0
        """Numbers of tokens, and of sequences that produced them, summed over the steps."""

    def figures(self, first: int, device: Device) -> dict[str, float]:
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


def measured_step(engine: Engine, steps: Steps, device: Device) -> StepReport:
    """Run a step of an engine, and record its durations without those of the device."""
    began, before = time.perf_counter(), device.seconds
    done = engine.step()
    device_s = device.seconds - before
    steps.total.append(time.perf_counter() - began - device_s)
    stages = {stage: getattr(done.times, stage) for stage in STAGES}
    stages["forward"] -= device_s
    steps.stages.append([*stages.values()])
    steps.committed += done.committed
    steps.produced += done.produced
    return done
