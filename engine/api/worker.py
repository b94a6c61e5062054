"""Engine process: receives requests through a pipe, runs the engine, and sends back its events and statistics."""

from __future__ import annotations

import gc
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from engine.api.messages import (
    CancelRequest,
    Command,
    CorpusSize,
    EngineFailed,
    EngineReady,
    EngineStats,
    Event,
    RequestEnded,
    RequestRefused,
    Shutdown,
    StepFinished,
    SubmitRequest,
    UpdateWeights,
    WeightsUpdated,
)
from engine.api.repeats import Repeats
from engine.drafters.sources import SOURCE_NAMES, count_sources
from engine.scheduling.request import Completion, FinishReason, Request
from ssd.errors import UserError
from ssd.types import offsets_of

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.scheduling.report import StepReport

STATS_INTERVAL_S = 0.25
MAX_RECEIVING_S = 0.1
"""Processor time after which a step runs before more commands are handled; a new grammar can take 0.2 s to compile."""
INDEXING_DELAY_S = 0.5
"""Time by which the corpus contains the last output; an idle engine then sends its statistics once more."""


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


def run_worker(connection: Connection, build: Callable[[], Engine]) -> None:
    """Run the engine process; `build` creates the engine."""
    # Signals such as Ctrl-C reach the whole process group; the HTTP process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        engine = build()
        # Otherwise a full collection of all objects of the model and its libraries delays a step, by up to a second.
        gc.collect()
        gc.freeze()
        try:
            Worker(engine, connection).run()
        finally:
            engine.close()
    except (EOFError, BrokenPipeError):
        pass  # The HTTP process has ended.
    except UserError as problem:
        connection.send([EngineFailed(str(problem))])
    except Exception as problem:
        traceback.print_exc()
        connection.send([EngineFailed(f"the engine failed: {type(problem).__name__}: {problem}")])
        sys.exit(1)


class Worker:
    """Runs one engine for the HTTP process at the other end of a pipe."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._requests: dict[int, SubmitRequest] = {}
        """Running requests by the engine's ids."""
        self._ids = np.empty((2, 0), np.int64)
        """Their ids of the engine, in ascending order, and of the HTTP process."""
        self._totals = EngineTotals(engine)
        self._repeats = Repeats(engine)
        self._stats_sent_at = 0.0
        self._is_stopping = False

    def run(self) -> None:
        """Serve until a `Shutdown` arrives. Raises EOFError and BrokenPipeError if the other process has ended."""
        model = self._engine.model
        self._connection.send([EngineReady(model.vocab_size, self._engine.window, model.eos_token_ids)])
        while not self._is_stopping:
            self._receive_commands()
            if self._engine.scheduler.has_work:
                self._report(self._engine.step())

    def _receive_commands(self) -> None:
        """Handle commands that have arrived; wait for one if the engine is idle."""
        if not self._engine.scheduler.has_work and not self._connection.poll():
            self._connection.send([self._totals.snapshot()])
            if not self._connection.poll(INDEXING_DELAY_S):
                self._connection.send([self._totals.snapshot()])
            self._handle(self._connection.recv())
        self._handle_arrived()

    def _handle_arrived(self) -> None:
        until = time.thread_time() + MAX_RECEIVING_S
        while not self._is_stopping and self._connection.poll() and time.thread_time() < until:
            self._handle(self._connection.recv())

    def _handle(self, command: Command) -> None:
        if isinstance(command, Shutdown):
            self._is_stopping = True
        elif isinstance(command, SubmitRequest):
            self._submit(command)
        elif isinstance(command, UpdateWeights):
            self._update_weights(command)
        else:
            self._cancel(command)

    def _submit(self, command: SubmitRequest) -> None:
        try:
            if (repeat := self._repeats.find(command.request)) is not None:
                self._totals.request_repeated(repeat)
                self._connection.send([RequestEnded(command.request_id, repeat)])
                return
            sequence_id = self._engine.add(command.request)
        except UserError as problem:
            self._connection.send([RequestRefused(command.request_id, str(problem))])
            return
        self._requests[sequence_id] = command
        self._ids = np.append(self._ids, [[sequence_id], [command.request_id]], axis=1)
        self._totals.request_started(command.request)

    def _cancel(self, command: CancelRequest) -> None:
        # There is none if the request ended before the command arrived.
        for sequence_id in self._ids[0, self._ids[1] == command.request_id].tolist():
            completion = self._engine.cancel(sequence_id)
            assert completion is not None
            self._end(sequence_id, completion)

    def _end(self, sequence_id: int, completion: Completion) -> SubmitRequest:
        self._ids = self._ids[:, self._ids[0] != sequence_id]
        submitted = self._requests.pop(sequence_id)
        self._totals.request_ended(submitted.request, completion)
        return submitted

    def _update_weights(self, command: UpdateWeights) -> None:
        """Replace the weights, and handle commands between the steps that this takes."""

        def observe(report: StepReport) -> None:
            self._report(report)
            self._handle_arrived()

        try:
            self._engine.update_weights(command.path, version=command.version, observe=observe)
        except UserError as problem:
            self._connection.send([RequestRefused(command.request_id, str(problem))])
        else:
            self._repeats.clear()
            self._connection.send([WeightsUpdated(command.request_id, self._engine.version)])

    def _report(self, report: StepReport) -> None:
        """Send the events of a step."""
        self._totals.step_finished(report)
        events: list[Event] = [self._tokens_of(report)] if len(report.arrays.ids) else []
        for sequence_id, completion in report.finished.items():
            submitted = self._end(sequence_id, completion)
            if sequence_id in report.refused:
                events.append(RequestRefused(submitted.request_id, report.refused[sequence_id]))
                continue
            self._repeats.add(submitted.request, completion)
            events.append(RequestEnded(submitted.request_id, completion))
        if time.monotonic() - self._stats_sent_at > STATS_INTERVAL_S:
            self._stats_sent_at = time.monotonic()
            events.append(self._totals.snapshot())
        if events:
            # `Connection.send` takes 10 us longer, for types that these messages do not have.
            self._connection.send_bytes(pickle.dumps(events, pickle.HIGHEST_PROTOCOL))

    def _tokens_of(self, report: StepReport) -> StepFinished:
        results = report.arrays
        own, request_ids = self._ids[:, np.searchsorted(self._ids[0], results.ids)]
        assert np.array_equal(own, results.ids), "a step has results of a request that does not run"
        visible = results.lengths.copy()
        for sequence_id, completion in report.finished.items():
            visible[results.ids == sequence_id] -= len(completion.tokens) - len(completion.content)
        offsets = offsets_of(results.lengths)
        return StepFinished(request_ids, offsets, results.tokens, results.accepted, visible, results.logprobs)
