"""Requests of recorded traffic in the vocabulary of a model, and serving them at a fixed concurrency."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.support import forget_peak, peak_bytes
from drafter_service.observability.measuring.rounds import Timer
from engine.engine import Engine
from engine.scheduling.report import StageTimes
from engine.scheduling.request import Request, SamplingParams
from ssd.errors import UserError
from ssd.replay import Recording
from ssd.types import Drafter

FIRST_LEARNED_ID = 1 << 32
"""First id of the requests that are only passed to the drafter; an engine's ids start at 0."""


class Item(NamedTuple):
    """One request of a session."""

    request: Request
    session: int
    """Session id; requests of a session run one after the other."""

    @property
    def texts(self) -> tuple[np.ndarray, np.ndarray]:
        """The prompt and the recorded output, uint32."""
        assert self.request.recorded is not None
        return self.request.prompt, self.request.recorded

    def with_sampling(self, **fields: Any) -> Item:
        """Return the request with other sampling settings; tokens of the model follow the recorded ones."""
        sampling = replace(self.request.sampling, **fields)
        return self._replace(request=replace(self.request, sampling=sampling))


def replay_items(trace: Recording, prompt_tokens: int, output_tokens: int, vocab_size: int) -> tuple[list[Item], bool]:
    """Return the requests of a trace, and whether their token ids were renumbered, because the model has fewer.

    prompt_tokens: longer prompts are truncated at the start. output_tokens: largest length of an output. Raises
    UserError if there are more distinct tokens than the model has.
    """
    texts = [np.concatenate((each.prompt[-prompt_tokens:], each.output[:output_tokens])) for each in trace.requests]
    flat = np.concatenate(texts)
    is_renumbered = int(flat.max()) >= vocab_size
    if is_renumbered:
        kinds, dense = np.unique(flat, return_inverse=True)
        if len(kinds) > vocab_size:
            raise UserError(
                f"the trace's requests have {len(kinds):,} distinct tokens, the model has {vocab_size:,}; "
                "take a shape with a larger vocabulary"
            )
        texts = np.split(dense.astype(np.uint32), np.cumsum([len(text) for text in texts])[:-1])
    items = []
    for text, length, session in zip(texts, trace.output_lengths.tolist(), trace.sessions.tolist(), strict=True):
        kept = min(length, output_tokens)
        sampling = SamplingParams(max_tokens=kept, ignore_eos=True)
        items.append(Item(Request(text[:-kept], sampling, recorded=text[-kept:]), session))
    return items, is_renumbered


def learn(drafter: Drafter, items: Sequence[Item]) -> None:
    """Let a drafter learn requests, as if they had been served."""
    for number, item in enumerate(items, FIRST_LEARNED_ID):
        prompt, recorded = item.texts
        drafter.start(number, prompt)
        drafter.finish(number, recorded)


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

    @property
    def draft_share(self) -> float:
        """Share of drafting in the time of all steps."""
        return sum(times.draft for times, _ in self.steps) / sum(times.total for times, _ in self.steps)


def serve(engine: Engine, items: Sequence[Item], concurrency: int) -> Run:
    """Keep `concurrency` requests running in the given order, at most one per session."""
    gc.collect()
    forget_peak()
    waiting, running = list(range(len(items))), dict[int, int]()
    run = Run([np.empty(0, np.uint32) for _ in items])

    def next_item() -> int | None:
        busy = {items[number].session for number in running.values()}
        return next((number for number in waiting if items[number].session not in busy), None)

    with Timer() as timer:
        while waiting or running:
            while len(running) < concurrency and (number := next_item()) is not None:
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
