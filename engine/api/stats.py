"""Statistics of an engine: totals over all steps, and the phases of each request."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.api.messages import CorpusSize, EngineStats, RequestTimes
from engine.drafters.sources import SOURCE_NAMES, count_sources
from engine.scheduling.request import Completion, FinishReason, Request
from engine.scheduling.table import ADMISSION, SEQUENCE_ID

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.scheduling.report import StepReport


class EngineTotals:
    """Totals of one engine since it started."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stats = EngineStats()
        """Scalar totals; the arrays below are counted separately, and `snapshot` adds the current load."""
        self._drafted_per_position = np.zeros(engine.max_draft, np.int64)
        self._accepted_per_position = np.zeros(engine.max_draft, np.int64)
        self._drafted_by_source = np.zeros(len(SOURCE_NAMES), np.int64)
        self._accepted_by_source = np.zeros(len(SOURCE_NAMES), np.int64)

    def request_started(self, request: Request) -> None:
        """Count a request that was added to the engine."""
        self._stats.prompt_tokens += len(request.prompt)

    def request_repeated(self, completion: Completion) -> None:
        """Count a request that was answered from the corpus."""
        self._stats.repeated_requests += 1
        self._stats.repeated_tokens += len(completion.tokens)

    def step_finished(self, report: StepReport) -> None:
        """Count one engine step."""
        self._stats.steps += 1
        self._stats.backoff_steps += report.is_backing_off
        results = report.arrays
        self._stats.sequence_steps += len(results.ids)
        self._stats.generated_tokens += len(results.tokens)
        if len(results.drafted_sources):
            self._stats.drafts += int(np.count_nonzero(results.depths))
            self._stats.drafted += len(results.drafted_sources)
            self._stats.accepted += len(results.accepted_sources)
            positions = np.arange(len(self._drafted_per_position))[:, None]
            self._drafted_per_position += np.count_nonzero(positions < results.depths, axis=1)
            self._accepted_per_position += np.count_nonzero(positions < results.accepted, axis=1)
            self._drafted_by_source += count_sources(results.drafted_sources)
            self._accepted_by_source += count_sources(results.accepted_sources)

    def request_ended(self, request: Request, completion: Completion) -> None:
        """Count a request that ended or was cancelled."""
        self._stats.cached_tokens += completion.cached_tokens
        if request.learn and completion.finish_reason is not FinishReason.ABORT:
            self._stats.learned_tokens += len(completion.tokens)

    def snapshot(self) -> EngineStats:
        """Return the totals and the current load."""
        scheduler = self._engine.scheduler
        return replace(
            self._stats,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            drafted_per_position=tuple(self._drafted_per_position.tolist()),
            accepted_per_position=tuple(self._accepted_per_position.tolist()),
            drafted_by_source=dict(zip(SOURCE_NAMES, self._drafted_by_source.tolist(), strict=True)),
            accepted_by_source=dict(zip(SOURCE_NAMES, self._accepted_by_source.tolist(), strict=True)),
            skipped_steps=dict(self._engine.drafter.skipped_steps),
            corpus=self._corpus_size(),
            drafter_failures=self._engine.drafter_failures.count,
            is_drafter_off=self._engine.drafter_failures.is_off,
            is_connected=self._engine.drafter.is_connected,
            kv_usage=1 - scheduler.pages.free_count / scheduler.pages.count,
        )

    def _corpus_size(self) -> CorpusSize | None:
        # Only the embedded drafter has a corpus in this process.
        corpus = next(iter(self._engine.drafter.corpora()), None)
        return None if corpus is None else CorpusSize(corpus.tokens, corpus.capacity)


@dataclass
class _Phases:
    """Times on the monotonic clock at which the phases of a request began."""

    submitted: float
    scheduled: float | None = None
    first_token: float | None = None


class RequestTimer:
    """Measures the phases of requests, by the engine's ids, on the monotonic clock."""

    def __init__(self) -> None:
        self._phases: dict[int, _Phases] = {}
        self._without_token: set[int] = set()
        """Requests that have not produced a token."""
        self._last_admission = 0
        self._last_step = 0.0

    def request_started(self, sequence_id: int) -> None:
        """Record that a request was added to the engine."""
        self._phases[sequence_id] = _Phases(time.monotonic())
        self._without_token.add(sequence_id)

    def step_finished(self, began: float, state: np.ndarray, report: StepReport) -> None:
        """Record a step that started at `began` and has just finished.

        state: int64 [S, COLUMNS], of the sequences that still run, see `engine.scheduling.table`.
        """
        self._last_step = time.monotonic()
        admissions = state[:, ADMISSION]
        admitted = state[admissions > self._last_admission, SEQUENCE_ID].tolist()
        self._last_admission = max(self._last_admission, int(admissions.max()))
        # A request that only scores its prompt ends without producing tokens.
        produced = self._without_token.intersection((*report.arrays.ids.tolist(), *report.finished))
        self._without_token -= produced
        for sequence_id in (*admitted, *produced):
            phases = self._phases[sequence_id]
            if phases.scheduled is None:
                phases.scheduled = began
        for sequence_id in produced:
            self._phases[sequence_id].first_token = self._last_step

    def request_ended(self, sequence_id: int) -> RequestTimes | None:
        """Delete the record of a request, and return its times until the last step; None if it has no token."""
        self._without_token.discard(sequence_id)
        phases = self._phases.pop(sequence_id)
        if phases.scheduled is None or phases.first_token is None:
            return None
        return RequestTimes(
            queue=phases.scheduled - phases.submitted,
            prefill=phases.first_token - phases.scheduled,
            decode=self._last_step - phases.first_token,
        )
