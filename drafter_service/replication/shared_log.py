"""The log of a namespace: events wait in an outbox of bounded size until Redis has accepted them, and others are read.

An entry has many events, and a round trip sends many entries. When too many tokens wait, the oldest requests are
dropped.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from drafter_service.replication.events import Dropped, Event, Finished, ForgottenBefore, encode
from drafter_service.replication.reader import Reader, RecentNames
from drafter_service.replication.redis_stream import (
    Addition,
    LogCounters,
    LogPosition,
    LogUnavailable,
    RedisStream,
    Retry,
)

ENTRY_TOKENS = 1 << 14
"""Number of tokens at which an entry is complete; larger entries would block a reader for longer."""
ENTRY_EVENTS = 256
ENTRIES_AT_ONCE = 16
EVENT_WEIGHT = 64
"""Memory of an event's objects, in tokens."""
GATHER_S = 0.005
"""Time that events wait for others to be sent together."""
FLUSH_S = 2.0
"""Maximum time for publishing what waits when a log is closed."""
QUEUE_TOKENS = 4_000_000
"""Maximum number of tokens of a namespace that wait while the log is unreachable; the oldest requests are dropped
first."""
TRIM_FRACTION = 64
"""The log is measured, and trimmed if necessary, each time 1 / TRIM_FRACTION of its maximum has been written."""


class _Waiting(NamedTuple):
    number: int
    event: Event


class Outbox:
    """Events that wait to be published, in order. Only the event loop may use it."""

    def __init__(self, max_tokens: int) -> None:
        """Make an empty outbox for `max_tokens` waiting tokens, where each request counts `EVENT_WEIGHT` more."""
        self._max_tokens = max_tokens
        self._tokens = 0
        self._finished: deque[_Waiting] = deque()
        # These are kept separately and never dropped: they are few, and forgetting must not be lost.
        self._forgetting: deque[_Waiting] = deque()
        self._next = 0
        self._taken_from: int | None = None
        self._filled = asyncio.Event()
        self._settled = asyncio.Event()
        self.is_overflowing = False
        """Whether requests were dropped since the outbox was last empty."""

    def put(self, event: Event) -> int:
        """Add an event; its tokens are copied. Return the number of tokens of requests dropped to make room."""
        waiting = _Waiting(self._next, event)
        self._next += 1
        if not isinstance(event, Finished):
            self._forgetting.append(waiting)
            self._filled.set()
            return 0
        if _weight(event) > self._max_tokens:
            self.is_overflowing = True
            return len(event.tokens)
        self._finished.append(
            waiting._replace(event=Finished(event.request, np.array(event.tokens), event.time, event.tag))
        )
        self._tokens += _weight(event)
        self._filled.set()
        return self._make_room()

    async def wait(self) -> None:
        """Wait until there is an event to take."""
        await self._filled.wait()

    def take(self) -> list[list[Event]]:
        """Remove and return the oldest events, one list per entry. For `flush` they are pending until `settle`."""
        self._taken_from = self._oldest_waiting
        entries: list[list[Event]] = []
        while len(entries) < ENTRIES_AT_ONCE and (entry := self._take_entry()):
            entries.append(entry)
        if self._oldest_waiting == self._next:
            self._filled.clear()
            self.is_overflowing = False
        return entries

    def settle(self) -> None:
        """Record that the events taken last have been published."""
        self._taken_from = None
        self._settled.set()
        self._settled.clear()

    async def flush(self) -> None:
        """Wait until everything that has been added so far is published or dropped."""
        end = self._next
        while (self._oldest_waiting if self._taken_from is None else self._taken_from) < end:
            await self._settled.wait()

    @property
    def _oldest_waiting(self) -> int:
        return min(queue[0].number if queue else self._next for queue in (self._finished, self._forgetting))

    def _make_room(self) -> int:
        dropped = 0
        while self._tokens > self._max_tokens:
            dropped += len(self._pop_finished().tokens)
        self.is_overflowing |= dropped > 0
        return dropped

    def _pop_finished(self) -> Finished:
        event = self._finished.popleft().event
        assert isinstance(event, Finished)
        self._tokens -= _weight(event)
        return event

    def _take_entry(self) -> list[Event]:
        entry: list[Event] = []
        tokens = 0
        while tokens < ENTRY_TOKENS and len(entry) < ENTRY_EVENTS and (self._finished or self._forgetting):
            forget_from = self._forgetting[0].number if self._forgetting else math.inf
            if self._finished and self._finished[0].number < forget_from:
                finished = self._pop_finished()
                tokens += len(finished.tokens)
                entry.append(finished)
            elif entry and isinstance(self._forgetting[0].event, ForgottenBefore | Dropped):
                # These events must be first in their entry, so that all earlier entries can be trimmed.
                break
            else:
                entry.append(self._forgetting.popleft().event)
        return entry


def _weight(event: Finished) -> int:
    return len(event.tokens) + (len(event.request) >> 2) + EVENT_WEIGHT


class NamespaceLog:
    """Publishes events of one namespace, and reads those of other replicas. Only the event loop may use it."""

    def __init__(self, stream: RedisStream, logger: Any, *, name: bytes, max_bytes: int) -> None:
        """Start publishing. name: identifies this replica in its entries. max_bytes: maximum size of the log."""
        self.counters = LogCounters()
        self._stream, self._outbox = stream, Outbox(QUEUE_TOKENS)
        self._logger = logger
        self._retry = Retry(logger.bind(task="write"), self.counters)
        self._name, self._max_bytes = name, max_bytes
        # The log may already be too large.
        self._bytes_since_trim = max_bytes
        self._writing = asyncio.create_task(self._write())

    @property
    def is_connected(self) -> bool:
        """Whether the last write succeeded."""
        return not self._retry.is_failing

    def publish(self, event: Event) -> None:
        """Queue an event for the other replicas; its tokens are copied. Never waits or fails."""
        if isinstance(event, Finished) and not len(event.tokens):
            return
        overflowed = self._outbox.is_overflowing
        self.counters.dropped_tokens += self._outbox.put(event)
        if self._outbox.is_overflowing and not overflowed:
            self._logger.warning("shared_log_drops_requests")

    async def flush(self) -> None:
        """Wait without a timeout until Redis has everything published so far."""
        await self._outbox.flush()

    def reader(self, after: LogPosition, known: Iterable[int]) -> Reader:
        """Return a reader of the other replicas' events, starting with the entry after a position.

        known: hashes (`ssd.corpus.requests.hash_of`) of names that have been learned, newest last. A snapshot contains
        all entries up to its position, and may contain later ones.
        """
        return Reader(
            self._stream, RecentNames(self.counters, known), self.counters, self._logger, own=self._name, after=after
        )

    async def close(self) -> None:
        """Publish waiting events if that is possible within `FLUSH_S`, and stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self.flush()
        self._writing.cancel()
        await asyncio.wait([self._writing])

    async def _write(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._outbox.wait()
            await asyncio.sleep(GATHER_S)
            entries = self._outbox.take()
            additions = [_addition(events, self._name) for events in entries]
            await self._add(additions)
            self.counters.published_tokens += sum(
                len(event.tokens) for events in entries for event in events if isinstance(event, Finished)
            )
            self._outbox.settle()
            self._bytes_since_trim += sum(len(column) for addition in additions for column in addition.fields.values())
            if self._bytes_since_trim >= self._max_bytes // TRIM_FRACTION:
                await self._trim()

    async def _add(self, additions: list[Addition]) -> None:
        while True:
            try:
                await self._stream.add(additions)
            except LogUnavailable as problem:
                await self._retry.pause(problem)
            else:
                self._retry.succeeded()
                return

    async def _trim(self) -> None:
        self._bytes_since_trim = 0
        try:
            await self._stream.trim(self._max_bytes)
        except LogUnavailable as problem:
            self.counters.errors += 1
            self._logger.warning("shared_log_not_trimmed", error=str(problem), task="write")


def _addition(events: list[Event], writer: bytes) -> Addition:
    match events[0]:
        case ForgottenBefore(time=time):
            trim_before: float | None = time
        case Dropped():
            trim_before = float("inf")
        case _:
            trim_before = None
    return Addition(encode(events, writer), trim_before)
