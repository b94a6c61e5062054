"""Requests of recorded traffic in the vocabulary of a model, and serving them at a fixed concurrency."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from benchmarks.gpu.bench import Bench, SkippedError
from benchmarks.support.resources import forget_peak, peak_bytes
from drafter_service.observability.measuring.rounds import Timer
from engine.engine import Engine
from engine.models.config import ModelConfig
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.times import Stage, StageTimes
from ssd.errors import UserError
from ssd.replay import Recording
from ssd.types import Drafter

WARM_UP_TOKENS = 8
FIRST_LEARNED_ID = 1 << 32
"""First id of the requests that are only passed to the drafter; an engine's ids start at 0."""


@dataclass(frozen=True)
class Limits:
    """Settings of all requests."""

    prompt_tokens: int
    """Largest number of prompt tokens; longer prompts are truncated at the start."""
    max_tokens: int


@dataclass(frozen=True, eq=False)
class Item:
    """One request of a session."""

    request: Request
    session: int
    """Session id; requests of a session run one after the other."""


def replay_items(trace: Recording, count: int, limits: Limits, model: ModelConfig) -> list[Item]:
    """Return the first requests of a trace. Raises UserError if they have more distinct tokens than the model."""
    requests = trace.requests[:count]
    texts = _texts(trace, count, limits)
    kept = [min(len(request.output), limits.max_tokens) for request in requests]
    return [
        Item(
            Request(text[:-length], SamplingParams(max_tokens=length, ignore_eos=True), recorded=text[-length:]),
            request.session,
        )
        for text, length, request in zip(_dense(texts, model.vocab_size), kept, requests, strict=True)
    ]


def is_renumbered(trace: Recording, count: int, limits: Limits, model: ModelConfig) -> bool:
    """Return whether `replay_items` changes the token ids of the trace."""
    return max(int(text.max()) for text in _texts(trace, count, limits)) >= model.vocab_size


def _texts(trace: Recording, count: int, limits: Limits) -> list[np.ndarray]:
    return [
        np.concatenate((request.prompt[-limits.prompt_tokens :], request.output[: limits.max_tokens]))
        for request in trace.requests[:count]
    ]


def _dense(texts: list[np.ndarray], vocab_size: int) -> list[np.ndarray]:
    """Return the texts with ids below `vocab_size`, renumbered if they have larger ones."""
    flat = np.concatenate(texts)
    if int(flat.max()) < vocab_size:
        return texts
    kinds, dense = np.unique(flat, return_inverse=True)
    if len(kinds) > vocab_size:
        raise UserError(
            f"the trace's requests have {len(kinds):,} distinct tokens, the model has {vocab_size:,}; "
            "take a shape with a larger vocabulary"
        )
    ends = np.cumsum([len(text) for text in texts])[:-1]
    return np.split(dense.astype(np.uint32), ends)


@dataclass(frozen=True)
class Traffic:
    """Requests in the vocabulary of the model."""

    learned: list[Item]
    served: list[Item]
    notes: dict[str, object]
    """Facts about the requests, for the results."""


def shortened(items: Sequence[Item]) -> list[Item]:
    """Return the same requests, with outputs of a few tokens."""
    return [
        replace(item, request=replace(item.request, sampling=replace(item.request.sampling, max_tokens=most)))
        for item in items
        if (most := min(WARM_UP_TOKENS, item.request.sampling.max_tokens))
    ]


def traffic(bench: Bench, count: int, concurrent: int) -> Traffic:
    """Return `count` requests of the trace to be served. Raises SkippedError without a trace.

    concurrent: number of requests that run at once, summed over the rounds. With fewer than two conversations for each
    of them, turns do not wait for earlier ones, because that would lower the concurrency.
    """
    path, cap = bench.setting.trace, bench.scale.prompt_tokens
    if path is None or not path.exists():
        raise SkippedError(f"no recorded traffic at {path}; give --trace FILE.npz")
    try:
        trace = Recording.load(path)
    except ValueError as error:
        raise SkippedError(str(error)) from None
    short = np.flatnonzero(trace.prompt_lengths <= cap)
    learned = min(bench.scale.learned, len(short) // 2)
    chosen = trace.take(short[: learned + count])
    if len(chosen) <= learned:
        raise SkippedError(f"the trace {trace.name} has no requests with prompts of at most {cap} tokens")
    limits = Limits(cap, bench.scale.output_tokens)
    items = replay_items(chosen, len(chosen), limits, bench.config)
    served = items[learned:]
    sessions = len({item.session for item in served})
    if apart := sessions < 2 * concurrent:
        served = [replace(item, session=number) for number, item in enumerate(served)]
    notes: dict[str, object] = {
        "trace": trace.name,
        "requests": len(served),
        "output_tokens": sum(item.request.sampling.max_tokens for item in served),
        "seen_before": learned,
        "renumbered": is_renumbered(chosen, len(chosen), limits, bench.config),
        "turns_wait_for_each_other": not apart,
    }
    return Traffic(items[:learned], served, notes)


def warm_up(drafter: Drafter, learned: list[Item]) -> None:
    """Pass requests to a drafter for learning, as if they had been served."""
    for number, item in enumerate(learned, FIRST_LEARNED_ID):
        assert item.request.recorded is not None
        drafter.start(number, item.request.prompt)
        drafter.finish(number, item.request.recorded)


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
