"""Client of the engine process: sends requests through a pipe and yields their events."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from engine.api.messages import (
    CancelRequest,
    Command,
    EngineFailed,
    EngineReady,
    EngineStats,
    Event,
    OutputEvent,
    RequestEnded,
    RequestEvent,
    RequestRefused,
    Shutdown,
    StepFinished,
    SubmitRequest,
    TokensProduced,
    UpdateWeights,
    WeightsUpdated,
)
from engine.api.worker import run_worker
from engine.scheduling.request import Request
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.engine import Engine

STOP_TIMEOUT_S = 10.0
StreamEvent = TokensProduced | RequestEvent | EngineFailed
Stream = asyncio.Queue[tuple[int, StreamEvent]]
"""Events with their request id."""


class EngineGoneError(Exception):
    """Raised when the engine process has ended; the message gives the reason."""


class EngineProcess:
    """Runs an engine in a separate process and exchanges messages with it. Use it from a single event loop."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        """`build` makes the engine in the other process, so it must be picklable."""
        self.stats = EngineStats()
        """Latest statistics of the engine."""
        self.gone: str | None = None
        """Reason why the engine process has ended; None while it runs."""
        self._build = build
        self._next_id = 0
        self._streams: dict[int, Stream] = {}
        """By request id: where the events of a request that has not ended go; those of one HTTP request share it."""
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._connection: Connection | None = None
        self._process: Any = None
        self._is_ready = False
        self._ended = asyncio.Event()

    async def start(self) -> EngineReady:
        """Start the process and wait until it has loaded its model. Raises UserError if it cannot."""
        context = multiprocessing.get_context("spawn")
        self._connection, worker_end = context.Pipe()
        self._process = context.Process(target=run_worker, args=(worker_end, self._build), name="ssd-engine")
        # Ctrl-C reaches the whole process group, and the new process would print a traceback before it can ignore it.
        # The tracker, which unblocks the signal when it starts, must run first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        worker_end.close()
        ready = await asyncio.to_thread(self._first_event)
        if isinstance(ready, EngineFailed):
            raise UserError(ready.reason)
        assert isinstance(ready, EngineReady)
        self._is_ready = True
        loop = asyncio.get_running_loop()
        connection = self._connection
        threading.Thread(target=self._read, args=(loop, connection), name="engine-reader", daemon=True).start()
        threading.Thread(target=self._write, args=(connection,), name="engine-writer", daemon=True).start()
        return ready

    async def stop(self) -> None:
        """End the process. Running requests are lost."""
        self._commands.put(Shutdown())
        if self._process is None:
            return
        if not self._is_ready:
            self._process.kill()  # It does not read commands while loading the model.
        await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)

    @property
    def open_requests(self) -> int:
        """Number of requests and updates of the weights that have not ended, whether or not their events were read."""
        return len(self._streams)

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, OutputEvent], None]:
        """Yield the events of requests, each with the index of its request. Closing the iterator cancels all requests.

        Raises UserError for a request that cannot run, and EngineGoneError.
        """
        with self._stream(len(requests)) as (ids, events):
            for request_id, request in zip(ids, requests, strict=True):
                self._commands.put(SubmitRequest(request_id, request))
            try:
                unended = len(ids)
                while unended:
                    request_id, event = await events.get()
                    _raise_failure(event)
                    assert isinstance(event, OutputEvent)
                    unended -= isinstance(event, RequestEnded)
                    yield ids.index(request_id), event
            finally:
                for request_id in ids:
                    if request_id in self._streams and self.gone is None:
                        self._commands.put(CancelRequest(request_id))

    async def update_weights(self, path: str, version: int | None) -> int:
        """Replace the weights, see `Engine.update_weights`; return the new version.

        Raises UserError for weights that do not fit, and EngineGoneError.
        """
        with self._stream(1) as ([request_id], events):
            self._commands.put(UpdateWeights(request_id, path, version))
            _, event = await events.get()
            _raise_failure(event)
            assert isinstance(event, WeightsUpdated)
            return event.version

    @contextmanager
    def _stream(self, count: int) -> Iterator[tuple[range, Stream]]:
        """Yield new request ids, and the queue of their events. Raises EngineGoneError."""
        if self.gone is not None:
            raise EngineGoneError(self.gone)
        events: Stream = asyncio.Queue()
        ids = range(self._next_id, self._next_id + count)
        self._next_id = ids.stop
        self._streams |= dict.fromkeys(ids, events)
        try:
            yield ids, events
        finally:
            for request_id in ids:
                self._streams.pop(request_id, None)

    async def wait_for_end(self) -> None:
        """Wait until the engine process has ended."""
        await self._ended.wait()

    def _write(self, connection: Connection) -> None:
        """Send commands from a thread, so that the event loop never blocks while the engine runs a step."""
        with suppress(OSError):
            while not isinstance(command := self._commands.get(), Shutdown):
                connection.send(command)
            connection.send(command)

    def _first_event(self) -> Event:
        assert self._connection is not None
        try:
            [event] = self._connection.recv()
        except EOFError:
            return EngineFailed("the engine process ended during its start")
        return event

    def _read(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        """Receive events in a thread as soon as they are sent, so that the engine never waits for the event loop."""
        reason = "the engine process has ended"
        try:
            while True:
                events = connection.recv()
                if isinstance(events[-1], EngineFailed):
                    reason = events[-1].reason
                    break
                loop.call_soon_threadsafe(self._dispatch, events)
        except (EOFError, OSError):
            pass
        except Exception as problem:  # Unpickling a truncated message can raise anything.
            reason = f"a message of the engine process cannot be read: {problem}"
        with suppress(RuntimeError):  # The loop may be closed by now.
            loop.call_soon_threadsafe(self._set_gone, reason)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, EngineStats):
                self.stats = event
            elif isinstance(event, StepFinished | RequestEvent):
                parts = event.parts() if isinstance(event, StepFinished) else [(event.request_id, event)]
                for request_id, part in parts:
                    if (stream := self._streams.get(request_id)) is not None:
                        stream.put_nowait((request_id, part))
                    if isinstance(part, RequestEnded | RequestRefused | WeightsUpdated):
                        self._streams.pop(request_id, None)

    def _set_gone(self, reason: str) -> None:
        self.gone = reason
        for request_id, stream in self._streams.items():
            stream.put_nowait((request_id, EngineFailed(reason)))
        self._ended.set()


def _raise_failure(event: StreamEvent) -> None:
    if isinstance(event, RequestRefused):
        raise UserError(event.reason)
    if isinstance(event, EngineFailed):
        raise EngineGoneError(event.reason)
