"""The engine's process: takes requests from a pipe, steps, tells what came of them."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from engine.api.messages import Begin, Cancel, Command, Ended, Event, Failed, Produced, Ready, Refused, Stop
from engine.api.tally import Tally
from engine.api.timing import Timing
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.engine import Engine

FIGURES_EVERY_S = 0.25
INDEXED_AFTER_S = 0.5
"""By then a drafter's corpus shows what ended last: the figures are told once more."""


def run_worker(connection: Connection, build: Callable[[], Engine]) -> None:
    """The whole life of the process; `build` makes its engine."""
    # Both processes get what is meant for their group, as Ctrl-C; the other one decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        engine = build()
        try:
            Worker(engine, connection).run()
        finally:
            engine.close()
    except (EOFError, BrokenPipeError):
        pass  # The other process is gone.
    except UserError as problem:
        connection.send([Failed(str(problem))])
    except Exception as problem:
        traceback.print_exc()
        connection.send([Failed(f"the engine broke: {type(problem).__name__}: {problem}")])
        sys.exit(1)


class Worker:
    """One engine behind one pipe."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._requests: dict[int, Begin] = {}
        """By the engine's ids."""
        self._tally = Tally(engine)
        self._timing = Timing()
        self._told_at = 0.0
        self._is_stopping = False

    def run(self) -> None:
        """Serve until told to stop. Raises EOFError and BrokenPipeError if nobody is there any more."""
        model, pages = self._engine.model, self._engine.scheduler.pages
        longest = min(model.max_positions, pages.count * pages.page_size)
        self._connection.send([Ready(model.vocab_size, longest, pages.page_size, pages.count)])
        while not self._is_stopping:
            self._take_commands()
            if self._engine.scheduler.has_work:
                self._step()

    def _take_commands(self) -> None:
        """Obey what has come; with nothing else to do, wait for it."""
        if not self._engine.scheduler.has_work and not self._connection.poll():
            self._connection.send([self._tally.figures()])
            if not self._connection.poll(INDEXED_AFTER_S):
                self._connection.send([self._tally.figures()])
            self._obey(self._connection.recv())
        while not self._is_stopping and self._connection.poll():
            self._obey(self._connection.recv())

    def _obey(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._is_stopping = True
        elif isinstance(command, Begin):
            self._begin(command)
        else:
            self._cancel(command)

    def _begin(self, command: Begin) -> None:
        try:
            sequence_id = self._engine.add(command.request)
        except UserError as problem:
            self._connection.send([Refused(command.request_id, str(problem))])
            return
        self._requests[sequence_id] = command
        self._tally.begun(sequence_id, command.request)
        self._timing.begun(sequence_id)

    def _cancel(self, command: Cancel) -> None:
        for sequence_id, begun in self._requests.items():
            if begun.request_id == command.request_id:
                completion = self._engine.cancel(sequence_id)
                assert completion is not None
                self._tally.ended(sequence_id, begun.request, completion)
                self._timing.dropped(sequence_id)
                del self._requests[sequence_id]
                return
        # It ended while the command was on its way.

    def _step(self) -> None:
        began = time.monotonic()
        report = self._engine.step()
        self._tally.stepped(report)
        self._timing.stepped(began, self._engine.scheduler.running, report)
        events: list[Event] = []
        for result in report.results:
            ended = report.finished.get(result.sequence_id)
            hidden = 0 if ended is None else len(ended.tokens) - len(ended.content)
            request_id, shown = self._requests[result.sequence_id].request_id, len(result.tokens) - hidden
            events.append(Produced(request_id, result.tokens, result.accepted, shown, result.logprobs))
        for sequence_id, completion in report.finished.items():
            begun = self._requests.pop(sequence_id)
            self._tally.ended(sequence_id, begun.request, completion)
            events.append(Ended(begun.request_id, completion, self._timing.ended(sequence_id)))
        if time.monotonic() - self._told_at > FIGURES_EVERY_S:
            self._told_at = time.monotonic()
            events.append(self._tally.figures())
        if events:
            self._connection.send(events)
