"""Engine process: receives requests through a pipe, runs the engine, and sends back its events."""

from __future__ import annotations

import gc
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from engine.api.messages import (
    CancelRequest,
    Command,
    EngineFailed,
    EngineReady,
    Event,
    RequestEnded,
    RequestRefused,
    RequestRestarted,
    RequestTimes,
    Shutdown,
    StepFinished,
    SubmitRequest,
    UpdateWeights,
    WeightsUpdated,
)
from engine.api.repeats import Repeats
from engine.api.stats import EngineTotals, RequestTimer
from ssd.errors import UserError
from ssd.types import offsets_of

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.scheduling.report import StepReport
    from engine.scheduling.request import Completion

STATS_INTERVAL_S = 0.25
MAX_RECEIVING_S = 0.1
"""Processor time after which a step runs before more commands are handled; a new grammar can take 0.2 s to compile."""
INDEXING_DELAY_S = 0.5
"""Time by which the corpus contains the last output; an idle engine then sends its statistics once more."""


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
        self._timer = RequestTimer()
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
                self._step()

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
        self._timer.request_started(sequence_id)

    def _cancel(self, command: CancelRequest) -> None:
        # There is none if the request ended before the command arrived.
        for sequence_id in self._ids[0, self._ids[1] == command.request_id].tolist():
            completion = self._engine.cancel(sequence_id)
            assert completion is not None
            self._end(sequence_id, completion)

    def _end(self, sequence_id: int, completion: Completion) -> tuple[SubmitRequest, RequestTimes | None]:
        self._ids = self._ids[:, self._ids[0] != sequence_id]
        submitted = self._requests.pop(sequence_id)
        self._totals.request_ended(submitted.request, completion)
        return submitted, self._timer.request_ended(sequence_id)

    def _update_weights(self, command: UpdateWeights) -> None:
        """Replace the weights, and handle commands between the steps that this takes."""
        began = time.monotonic()

        def observe(report: StepReport) -> None:
            nonlocal began
            self._report(report, began)
            self._handle_arrived()
            began = time.monotonic()

        try:
            self._engine.update_weights(command.path, version=command.version, running=command.running, observe=observe)
        except UserError as problem:
            self._connection.send([RequestRefused(command.request_id, str(problem))])
        else:
            self._repeats.clear()
            self._connection.send([WeightsUpdated(command.request_id, self._engine.version)])

    def _step(self) -> None:
        began = time.monotonic()
        self._report(self._engine.step(), began)

    def _report(self, report: StepReport, began: float) -> None:
        """Send the events of a step that began at a time on the monotonic clock."""
        self._totals.step_finished(report)
        self._timer.step_finished(began, self._engine.scheduler.table.state, report)
        events: list[Event] = [RequestRestarted(self._requests[each].request_id) for each in report.restarted]
        if len(report.arrays.ids):
            events.append(self._tokens_of(report))
        for sequence_id, completion in report.finished.items():
            submitted, times = self._end(sequence_id, completion)
            if sequence_id in report.refused:
                events.append(RequestRefused(submitted.request_id, report.refused[sequence_id]))
                continue
            self._repeats.add(submitted.request, completion)
            events.append(RequestEnded(submitted.request_id, completion, times))
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
