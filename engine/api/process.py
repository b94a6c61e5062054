"""The engine as seen from the HTTP process: requests go in, events come out, for each request apart."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from engine.api.growth import Growth
from engine.api.messages import Begin, Cancel, Command, Ended, Event, Failed, Figures, Produced, Ready, Refused, Stop
from engine.api.worker import run_worker
from engine.scheduling.request import Request
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.engine import Engine

STOP_TIMEOUT_S = 10.0


class EngineGoneError(Exception):
    """The engine's process has ended; the text says why."""


class EngineProcess:
    """Starts an engine in a process of its own and talks to it. One event loop uses it."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        """`build` makes the engine, over there: it must be picklable."""
        self.figures = Figures()
        """What the engine said last."""
        self.growth = Growth()
        """Of the corpus, or if it is elsewhere of what was given to it; by the monotonic clock."""
        self.gone: str | None = None
        """Why there is no engine any more."""
        self._build = build
        self._ids = itertools.count()
        self._streams: dict[int, asyncio.Queue[Event]] = {}
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._connection: Connection | None = None
        self._process: Any = None
        self._is_ready = False
        self._ended = asyncio.Event()

    async def start(self) -> Ready:
        """Start the process and wait until it has loaded its model. Raises UserError if it cannot."""
        spawning = multiprocessing.get_context("spawn")
        self._connection, theirs = spawning.Pipe()
        self._process = spawning.Process(target=run_worker, args=(theirs, self._build), name="ssd-engine")
        self._process.start()
        theirs.close()
        ready = await asyncio.to_thread(self._first_event)
        if isinstance(ready, Failed):
            raise UserError(ready.reason)
        assert isinstance(ready, Ready)
        self._is_ready = True
        loop = asyncio.get_running_loop()
        connection = self._connection
        threading.Thread(target=self._read, args=(loop, connection), name="engine-reader", daemon=True).start()
        threading.Thread(target=self._write, args=(connection,), name="engine-writer", daemon=True).start()
        return ready

    async def stop(self) -> None:
        """End the process; what runs is lost."""
        self._commands.put(Stop())
        if self._process is None:
            return
        if not self._is_ready:
            self._process.kill()  # It loads, and listens to nobody yet.
        await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)

    async def run(self, request: Request) -> AsyncGenerator[Produced | Ended, None]:
        """The events of a request. Closing the iterator before its end cancels it.

        Raises UserError for a request that cannot run, and EngineGoneError.
        """
        if self.gone is not None:
            raise EngineGoneError(self.gone)
        request_id = next(self._ids)
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._streams[request_id] = events
        is_over = False
        try:
            self._commands.put(Begin(request_id, request))
            while not is_over:
                event = await events.get()
                is_over = not isinstance(event, Produced)
                if isinstance(event, Refused):
                    raise UserError(event.reason)
                if isinstance(event, Failed):
                    raise EngineGoneError(event.reason)
                assert isinstance(event, (Produced, Ended))
                yield event
        finally:
            del self._streams[request_id]
            if not is_over and self.gone is None:
                self._commands.put(Cancel(request_id))

    async def wait_for_end(self) -> None:
        """Wait until there is no engine any more."""
        await self._ended.wait()

    def _write(self, connection: Connection) -> None:
        """The writer's thread: the event loop does not wait for an engine that is in the middle of a step."""
        with suppress(OSError):
            while not isinstance(command := self._commands.get(), Stop):
                connection.send(command)
            connection.send(command)

    def _first_event(self) -> Event:
        assert self._connection is not None
        try:
            [event] = self._connection.recv()
        except EOFError:
            return Failed("the engine's process ended while it was starting")
        return event

    def _read(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        """The reader's thread: whatever the engine says, as soon as it says it, so that it never waits."""
        reason = "the engine's process has ended"
        try:
            while True:
                events = connection.recv()
                if isinstance(events[-1], Failed):
                    reason = events[-1].reason
                    break
                loop.call_soon_threadsafe(self._dispatch, events)
        except (EOFError, OSError):
            pass
        except Exception as problem:  # What was cut off in the middle unpickles to anything.
            reason = f"the engine's process cannot be understood: {problem}"
        with suppress(RuntimeError):  # The loop may be closed by now.
            loop.call_soon_threadsafe(self._lose, reason)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Figures):
                self.figures = event
                total = event.learned_tokens if event.corpus is None else event.corpus.tokens
                self.growth.note(time.monotonic(), total)
            elif isinstance(event, (Produced, Ended, Refused)) and (stream := self._streams.get(event.request_id)):
                stream.put_nowait(event)

    def _lose(self, reason: str) -> None:
        self.gone = reason
        for stream in self._streams.values():
            stream.put_nowait(Failed(reason))
        self._ended.set()
