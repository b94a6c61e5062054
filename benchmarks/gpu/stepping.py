"""Steps of an engine in which every sequence produces, timed one by one, and their kernels on a GPU's timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.gpu.bench import MAX_DRAFT, PROMPT_STEP_TOKENS, Bench
from engine.engine import Engine
from engine.scheduling.report import StepReport
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DraftShape
from ssd.types import DraftBatch, Drafter, Progress, Source, offsets_of

WARM_STEPS = 5
ACCEPT_PROB = 0.9
"""`accept_prob` of draft tokens that are always rejected."""
MIN_GAP_US = 5.0
"""Smallest gap between steps. Gaps between kernels of one step are shorter: 1 to 2 us within a CUDA graph."""
NOT_WORK = ("Memcpy", "Memset")
"""Prefixes of the profiler's names of copies, during which the multiprocessors are idle."""


class FixedDrafter(Drafter):
    """Drafts random tokens in the same shape for every sequence, from those that `random_requests` never produce."""

    def __init__(self, parents: np.ndarray, vocab_size: int) -> None:
        """parents: int32 [k]."""
        self._parents = parents
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)

    def draft(self, progress: Progress) -> DraftBatch:
        """Return a draft of the same shape for every sequence, truncated to `max_draft` tokens."""
        lengths = np.minimum(progress.max_draft, len(self._parents)).astype(np.uint32)
        parents = [self._parents[:length] for length in lengths.tolist()]
        count = int(lengths.sum())
        return DraftBatch(
            tokens=self._random.integers(self._vocab_size // 2, self._vocab_size, count, np.uint32),
            parents=np.concatenate([np.empty(0, np.int32), *parents]),
            accept_prob=np.full(count, ACCEPT_PROB, np.float32),
            source=np.full(count, Source.CORPUS, np.uint8),
            offsets=offsets_of(lengths),
        )


def path(length: int) -> np.ndarray:
    """Return the parents of a draft without branches, int32 [length]."""
    return np.arange(-1, length - 1, dtype=np.int32)


def binary_tree(nodes: int) -> np.ndarray:
    """Return the parents of a tree in which every token has two children, int32 [nodes]."""
    return ((np.arange(nodes, dtype=np.int32) + 1) // 2 - 1).astype(np.int32)


def random_requests(bench: Bench, count: int, prompt_tokens: int, output_tokens: int, seed: int = 0) -> list[Request]:
    """Return requests with random prompts that share no prefix, and the same output.

    Adjacent positions have different tokens, so that no drafter finds them earlier in the text.
    """
    random = np.random.default_rng(seed)
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    output = np.arange(output_tokens, dtype=np.uint32) % np.uint32(bench.config.vocab_size // 2)
    return [
        Request(random.integers(0, bench.config.vocab_size, prompt_tokens, np.uint32), sampling, recorded=output)
        for _ in range(count)
    ]


class Interval(NamedTuple):
    """Start and end of a kernel, in microseconds."""

    begin: float
    end: float
    name: str = ""


def gaps(kernels: Sequence[Interval]) -> list[float]:
    """Return the gaps, in microseconds, in which no kernel ran; kernels may overlap, in any order."""
    found, busy_until = [], None
    for kernel in sorted(kernels):
        if busy_until is not None and kernel.begin > busy_until:
            found.append(kernel.begin - busy_until)
        busy_until = kernel.end if busy_until is None else max(busy_until, kernel.end)
    return found


def span(kernels: Sequence[Interval]) -> float:
    """Return the microseconds from the start of the first kernel to the end of the last one."""
    return max(kernel.end for kernel in kernels) - min(kernel.begin for kernel in kernels) if kernels else 0.0


def idle_share(kernels: Sequence[Interval], min_gap: float = 0.0) -> float:
    """Return the share of time, 0 to 1, in gaps of at least `min_gap` us. Raises ValueError without kernels."""
    if not span(kernels):
        raise ValueError("no kernel ran, so there is no time to take a share of")
    return sum(gap for gap in gaps(kernels) if gap >= min_gap) / span(kernels)


def by_name(kernels: Sequence[Interval], count: int = 12) -> list[tuple[str, float]]:
    """Return the `count` kernels with the largest shares of the kernels' time, and the shares."""
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[kernel.name] += kernel.end - kernel.begin
    total = sum(sums.values())
    ranked = sorted(sums.items(), key=lambda item: -item[1])[:count]
    return [(name[:80], round(time / total, 4)) for name, time in ranked]


def record(run: Callable[[], object]) -> list[Interval]:
    """Return the kernels that ran on the GPU during `run`."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    return [
        Interval(event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3, event.name())
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith(NOT_WORK)
    ]


class Stream:
    """Times the steps of an engine after all its sequences have run their prompts."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._count = len(requests)
        for request in requests:
            engine.add(request)
        while engine.step().produced < self._count:
            pass
        for _ in range(WARM_STEPS):
            self.step()

    def step(self) -> StepReport:
        """Run one step. Raises RuntimeError if not every sequence produced tokens."""
        report = self._engine.step()
        if report.produced != self._count:
            raise RuntimeError(f"{report.produced} of {self._count} sequences produced: some ended or waited")
        return report

    def timed(self, steps: int) -> tuple[list[float], list[StepReport]]:
        """Return the seconds of each step, from the end of the previous one, and the steps' reports."""
        # A step in flight may have finished while other streams ran.
        self.step()
        seconds, reports = [], []
        last = perf_counter()
        for _ in range(steps):
            reports.append(self.step())
            now = perf_counter()
            seconds.append(now - last)
            last = now
        return seconds, reports

    def recorded(self, steps: int) -> list[Interval]:
        """Return the kernels of `steps` steps."""
        return record(lambda: [self.step() for _ in range(steps)])


class Timed(NamedTuple):
    """The timed steps of one drafter."""

    rounds: list[list[float]]
    """Seconds of each step, one list for each round."""
    reports: list[StepReport]
    kernels: list[Interval]
    """Kernels of further steps; empty without a GPU."""

    @property
    def medians(self) -> list[float]:
        """Median step time of each round, in seconds."""
        return [median(seconds) for seconds in self.rounds]


def time_steps(
    bench: Bench,
    drafters: Mapping[str, Drafter],
    sequences: int,
    context: int,
    *,
    max_draft: int = MAX_DRAFT,
    shape: DraftShape = "path",
    recorded: int = 0,
) -> dict[str, Timed]:
    """Time steps with about `context` tokens before them, alternating drafters every `bench.scale.steps` steps.

    Each drafter has one engine for all rounds. At the end, `recorded` more steps run with the profiler.
    """
    # Sequences whose prompts finish first produce tokens while the other prompts run.
    prompt_steps = -(-sequences * context // PROMPT_STEP_TOKENS)
    max_steps = prompt_steps + WARM_STEPS + bench.scale.rounds * (1 + bench.scale.steps) + recorded + 2
    # Leave room for two more drafts after the last step.
    longest = max_steps + 2 * max_draft
    requests = random_requests(bench, sequences, max(1, context - max_steps // 2), longest)
    with ExitStack() as stack:
        streams = {}
        for name, drafter in drafters.items():
            engine = bench.engine(drafter, sequences, context + longest, max_draft=max_draft, shape=shape)
            stack.enter_context(closing(engine))
            streams[name] = Stream(engine, requests)
        found = {name: Timed([], [], []) for name in drafters}
        for _ in range(bench.scale.rounds):
            for name, stream in streams.items():
                seconds, reports = stream.timed(bench.scale.steps)
                found[name].rounds.append(seconds)
                found[name].reports.extend(reports)
        if recorded and bench.on_gpu:
            for name, stream in streams.items():
                found[name].kernels.extend(stream.recorded(recorded))
    return found


def ratios(timed: Timed, other: Timed) -> list[float]:
    """Return the ratio of the two step times within each round."""
    return [mine / theirs for mine, theirs in zip(timed.medians, other.medians, strict=True)]
