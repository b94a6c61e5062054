"""Statistics of an engine: totals over all steps, and the phases of each request."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from engine.api.messages import STEP_TOKEN_BOUNDS, CorpusSize, EngineStats, RequestTimes
from engine.scheduling.request import Completion, FinishReason, Request
from ssd.types import Source

if TYPE_CHECKING:
    from engine.engine import Engine, StepReport
    from engine.scheduling.plan import SequenceResult
    from engine.scheduling.sequence import Sequence

SOURCES = tuple(source.name.lower() for source in Source)


class EngineTotals:
    """Totals of one engine since it started."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = self._prompt_tokens = self._cached_tokens = self._generated = self._learned = 0
        self._sequence_steps = self._drafts = self._drafted = self._accepted = 0
        self._drafted_per_position = np.zeros(engine.max_draft, np.int64)
        self._accepted_per_position = np.zeros(engine.max_draft, np.int64)
        self._drafted_by_source = np.zeros(len(SOURCES), np.int64)
        self._accepted_by_source = np.zeros(len(SOURCES), np.int64)
        self._steps_by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._step_tokens_sum = 0
        self._pending_prompts: dict[int, int] = {}
        """Prompt lengths of requests that have not produced a token yet, by the engine's ids."""

    def request_started(self, sequence_id: int, request: Request) -> None:
        """Count a request that the engine took."""
        self._prompt_tokens += len(request.prompt)
        self._pending_prompts[sequence_id] = len(request.prompt)

    def step_finished(self, report: StepReport) -> None:
        """Count one engine step."""
        self._steps += 1
        step_tokens = 0
        drafts: list[SequenceResult] = []
        for result in report.results:
            self._sequence_steps += 1
            step_tokens += len(result.tokens) + self._pending_prompts.pop(result.sequence_id, 0)
            self._generated += len(result.tokens)
            if result.drafted:
                drafts.append(result)
        if step_tokens:
            self._steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, step_tokens)] += 1
            self._step_tokens_sum += step_tokens
        if drafts:
            self._count_drafts(drafts)

    def request_ended(self, sequence_id: int, request: Request, completion: Completion) -> None:
        """Count a request that ended or was cancelled."""
        self._pending_prompts.pop(sequence_id, None)
        self._cached_tokens += completion.cached_tokens
        if request.learn and completion.finish_reason is not FinishReason.ABORT:
            self._learned += len(completion.tokens)

    def snapshot(self) -> EngineStats:
        """Return the totals and the current load."""
        scheduler = self._engine.scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            steps=self._steps,
            steps_by_tokens=tuple(self._steps_by_tokens),
            step_tokens_sum=self._step_tokens_sum,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            sequence_steps=self._sequence_steps,
            drafts=self._drafts,
            drafted=self._drafted,
            accepted=self._accepted,
            drafted_per_position=tuple(self._drafted_per_position.tolist()),
            accepted_per_position=tuple(self._accepted_per_position.tolist()),
            drafted_by_source=dict(zip(SOURCES, self._drafted_by_source.tolist(), strict=True)),
            accepted_by_source=dict(zip(SOURCES, self._accepted_by_source.tolist(), strict=True)),
            learned_tokens=self._learned,
            corpus=self._corpus_size(),
            kv_usage=1 - scheduler.pages.free_count / scheduler.pages.count,
            pages=scheduler.pages.count,
        )

    def _count_drafts(self, drafts: list[SequenceResult]) -> None:
        self._drafts += len(drafts)
        for result in drafts:
            self._drafted += result.drafted
            self._accepted += result.accepted
            self._drafted_per_position[: result.max_accepted] += 1
            self._accepted_per_position[: result.accepted] += 1
        self._drafted_by_source += _count_by_source([result.sources for result in drafts])
        self._accepted_by_source += _count_by_source([result.sources[result.kept] for result in drafts])

    def _corpus_size(self) -> CorpusSize | None:
        # Only the embedded drafter has a corpus in this process.
        corpus = getattr(self._engine.drafter, "corpus", None)
        return None if corpus is None else CorpusSize(corpus.tokens, corpus.capacity)


class RequestTimer:
    """Measures the phases of requests, by the engine's ids, on the monotonic clock."""

    def __init__(self) -> None:
        self._submitted: dict[int, float] = {}
        """Requests that were not scheduled yet."""
        self._queued_s: dict[int, float] = {}
        """Seconds until scheduled."""
        self._scheduled: dict[int, float] = {}
        self._first_token: dict[int, float] = {}
        self._last_step = 0.0

    def request_started(self, sequence_id: int) -> None:
        """Note that the engine took a request."""
        self._submitted[sequence_id] = time.monotonic()

    def step_finished(self, began: float, running: Iterable[Sequence], report: StepReport) -> None:
        """Note a step that started at `began` and has just finished; `running`: sequences that still run after it."""
        self._last_step = time.monotonic()
        if self._submitted:
            for sequence in running:
                self._note_scheduled(sequence.sequence_id, began)
        for result in report.results:
            if result.sequence_id not in self._first_token:
                self._note_scheduled(result.sequence_id, began)
                self._first_token[result.sequence_id] = self._last_step

    def request_ended(self, sequence_id: int) -> RequestTimes:
        """Return the times of a request that ended with the last step, and forget it."""
        first = self._first_token[sequence_id]
        times = RequestTimes(self._queued_s[sequence_id], first - self._scheduled[sequence_id], self._last_step - first)
        self.request_cancelled(sequence_id)
        return times

    def request_cancelled(self, sequence_id: int) -> None:
        """Forget a request."""
        for times in (self._submitted, self._queued_s, self._scheduled, self._first_token):
            times.pop(sequence_id, None)

    def _note_scheduled(self, sequence_id: int, at: float) -> None:
        """Note when a request was first scheduled; later calls change nothing."""
        submitted = self._submitted.pop(sequence_id, None)
        if submitted is not None:
            self._queued_s[sequence_id] = at - submitted
            self._scheduled[sequence_id] = at


def _count_by_source(sources: list[np.ndarray]) -> np.ndarray:
    """Number of tokens per source, int64; unknown sources of a remote drafter are left out."""
    return np.bincount(np.concatenate(sources), minlength=len(SOURCES))[: len(SOURCES)]
