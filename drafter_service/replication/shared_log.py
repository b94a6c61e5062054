"""The log of a namespace, to which this sidecar writes its events, and from which it reads those of others.

An entry has many events, and a round trip has many entries. Events wait in memory until Redis has them. When too many
tokens wait, the oldest requests are dropped.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from drafter_service.observability.report.schema import SharedLogReport
from drafter_service.replication.events import Event, Kind, LogEntry, decode, encode, forgets_all
from drafter_service.replication.redis_stream import (
    OLDEST,
    LogPosition,
    LogUnavailable,
    RedisStream,
    Retry,
)
from drafter_service.transport.wire import WireError

ENTRY_TOKENS = 1 << 14
"""Number of tokens at which an entry is complete; larger entries would block a reader for longer."""
ENTRY_EVENTS = 256
ENTRIES_AT_ONCE = 16
"""Entries per round trip: about one megabyte at the usual size."""
EVENT_WEIGHT = 64
"""Memory of an event's objects, in tokens."""
GATHER_S = 0.005
"""Time that events wait for others to be sent together."""
FLUSH_S = 5.0
"""Maximum time for publishing what waits when a log is closed, or when a command must reach the other sidecars."""
QUEUE_TOKENS = 4_000_000
"""Maximum number of tokens of a namespace that wait while the log is unreachable; the oldest requests are dropped
first."""
TRIM_FRACTION = 64
"""The log is measured, and trimmed if necessary, each time 1 / TRIM_FRACTION of its maximum has been written."""
LAG_INTERVAL_S = 1.0
"""Interval between measurements of the lag."""
TRIMMED_BEFORE = (Kind.FORGOTTEN_BEFORE, Kind.DROPPED)
"""Kinds of events that must be first in their entry, so that all earlier entries can be trimmed."""


class Waiting(NamedTuple):
    """An event that Redis may not have."""

    number: int
    """Number of events that were published up to this one."""
    event: Event


TakeEntry = Callable[[LogEntry], Awaitable[None]]


class NamespaceLog:
    """Publishes events of one namespace. Only the event loop may use it."""

    def __init__(self, stream: RedisStream, logger: Any, *, name: bytes, max_bytes: int) -> None:
        """Start publishing. name: identifies this sidecar in its entries. max_bytes: maximum size of the log."""
        self.counters = SharedLogReport()
        """Totals, those of the reader included; without the state of the connections."""
        self._stream, self._logger = stream, logger
        self._published = 0
        """Number of events that `publish` has queued."""
        self._waiting: deque[Waiting] = deque()
        self._adding: list[list[Waiting]] = []
        """The entries that are being added; those that have `_positions` only need trimming."""
        self._positions: list[LogPosition] = []
        self._weight = 0
        """Tokens of the requests among them, where each counts `EVENT_WEIGHT` more."""
        self._is_filled, self._are_added = asyncio.Event(), asyncio.Event()
        self._is_overflowing = False
        """Whether requests were dropped since nothing waited."""
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
        """Queue an event for the other sidecars; its tokens are copied. Never waits or fails."""
        if event.kind is Kind.FINISHED:
            if not len(event.tokens):
                return
            if _weight(event) > QUEUE_TOKENS:
                self._drop(event)
                return
            event = event._replace(tokens=np.array(event.tokens))
            self._weight += _weight(event)
        self._published += 1
        self._waiting.append(Waiting(self._published, event))
        self._make_room()
        self._is_filled.set()

    def has_unpublished(self) -> bool:
        """Return whether there are events that Redis may not have."""
        return bool(self._adding or self._waiting)

    async def flush(self) -> None:
        """Wait without a timeout until Redis has everything that was published before."""
        last = self._published
        while self.has_unpublished():
            oldest = self._adding[0][0] if self._adding else self._waiting[0]
            if oldest.number > last:
                return
            await self._are_added.wait()

    async def is_published(self) -> bool:
        """Return whether Redis has everything that was published before; wait up to `FLUSH_S` for it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self.flush()
                return True
        return False

    async def close(self) -> None:
        """Publish waiting events if that is possible within `FLUSH_S`, and stop. Others are discarded and counted."""
        await self.is_published()
        self._writing.cancel()
        await asyncio.wait([self._writing])
        discarded = [*chain.from_iterable(self._adding), *self._waiting]
        if discarded:
            self.counters.dropped_tokens += sum(len(each.event.tokens) for each in discarded)
            self._logger.warning("shared_log_discards_events", events=len(discarded))

    def _make_room(self) -> None:
        """Drop the oldest requests. Other events are kept: they are few, and forgetting must not be lost."""
        kept: list[Waiting] = []
        while self._weight > QUEUE_TOKENS:
            oldest = self._waiting.popleft()
            if oldest.event.kind is Kind.FINISHED:
                self._weight -= _weight(oldest.event)
                self._drop(oldest.event)
            else:
                kept.append(oldest)
        self._waiting.extendleft(reversed(kept))

    def _drop(self, event: Event) -> None:
        """Count a request that is not published."""
        self.counters.dropped_tokens += len(event.tokens)
        if not self._is_overflowing:
            self._is_overflowing = True
            self._logger.warning("shared_log_drops_requests")

    async def _write(self) -> None:
        """Publish until cancelled."""
        while True:
            try:
                await self._write_next()
            except Exception as problem:
                await self._retry.pause(problem)

    async def _write_next(self) -> None:
        """Publish the next entries; after an exception, the same ones again from the step that failed."""
        if not self._adding:
            await self._is_filled.wait()
            await asyncio.sleep(GATHER_S)
            while self._waiting and len(self._adding) < ENTRIES_AT_ONCE:
                self._adding.append(self._take_entry())
        if not self._positions:
            entries = [encode([each.event for each in entry], self._name) for entry in self._adding]
            self._positions = await self._stream.add(entries)
            added = chain.from_iterable(self._adding)
            self.counters.published_tokens += sum(len(each.event.tokens) for each in added)
            self._bytes_since_trim += sum(len(column) for fields in entries for column in fields.values())
        for entry, position in zip(self._adding, self._positions, strict=True):
            event = entry[0].event
            if event.kind in TRIMMED_BEFORE:
                await self._stream.trim_before(math.inf if event.kind is Kind.DROPPED else event.time, position)
        self._retry.succeeded()
        self._adding, self._positions = [], []
        self._are_added.set()
        self._are_added = asyncio.Event()
        if self._bytes_since_trim >= self._max_bytes // TRIM_FRACTION:
            await self._trim()
        if not self._waiting:
            self._is_overflowing = False
            self._is_filled.clear()

    def _take_entry(self) -> list[Waiting]:
        entry: list[Waiting] = []
        tokens = 0
        while self._waiting and tokens < ENTRY_TOKENS and len(entry) < ENTRY_EVENTS:
            if entry and self._waiting[0].event.kind in TRIMMED_BEFORE:
                break
            entry.append(self._waiting.popleft())
            event = entry[-1].event
            if event.kind is Kind.FINISHED:
                tokens += len(event.tokens)
                self._weight -= _weight(event)
        return entry

    async def _trim(self) -> None:
        self._bytes_since_trim = 0
        try:
            await self._stream.trim(self._max_bytes)
        except LogUnavailable as problem:
            self.counters.errors += 1
            self._logger.warning("shared_log_not_trimmed", error=str(problem), task="write")


class Reader:
    """Reads the events that other sidecars published, in order, no faster than they are learned.

    Entries are read twice if the answer to a writer was lost; the namespace learns a name once. A sidecar that was
    disconnected may publish a request after another one has forgotten it; the namespace does not learn it either.
    """

    def __init__(self, stream: RedisStream, counters: SharedLogReport, logger: Any, *, after: LogPosition) -> None:
        """Make a reader that does not read yet."""
        self._stream, self._counters = stream, counters
        self._logger = logger.bind(task="read")
        self._retry = Retry(self._logger, counters)
        self.position = after
        """Position of the last entry whose events were passed on. A reader that starts here misses nothing."""
        self.newest = -math.inf
        """Newest time of a request in the entries up to the position."""
        self._lag_s, self._measured = 0.0, time.monotonic()
        self._is_current = False

    @property
    def is_connected(self) -> bool:
        """Whether the last entries could be read and passed on."""
        return not self._retry.is_failing

    @property
    def is_current(self) -> bool:
        """Whether the newest entry has been passed on, as far as it is known."""
        return self._is_current

    @property
    def lag_s(self) -> float:
        """Seconds behind the newest entry. They grow while Redis is unavailable or events are being learned."""
        return 0.0 if self._is_current else self._lag_s + time.monotonic() - self._measured

    async def run(self, take: TakeEntry) -> None:
        """Pass each entry to `take`, one call at a time, until cancelled.

        Tokens of its events are views of what was read. After an exception of `take` the entry is passed again.
        """
        while True:
            try:
                await self._measure_lag()
                while True:
                    await self._read(take)
            except Exception as problem:
                self._record_lag()
                await self._retry.pause(problem)

    async def _read(self, take: TakeEntry) -> None:
        entries = await self._stream.read(self.position, ENTRIES_AT_ONCE, wait=self._is_current)
        if entries:
            self._record_lag()
        malformed = 0
        for position, fields in entries:
            try:
                entry = decode(fields)
            except WireError:
                malformed += 1
            else:
                await take(entry)
                finished = [each.time for each in entry.events if each.kind is Kind.FINISHED]
                self.newest = max([self.newest, *finished])
            self.position = position
        self._retry.succeeded()
        if malformed:
            self._counters.malformed += malformed
            self._logger.warning("shared_log_entries_malformed", entries=malformed)
        if len(entries) < ENTRIES_AT_ONCE:
            self._is_current = True
        if entries and time.monotonic() - self._measured > LAG_INTERVAL_S:
            await self._measure_lag()

    def _record_lag(self) -> None:
        if self._is_current:
            self._is_current, self._lag_s, self._measured = False, 0.0, time.monotonic()

    async def _measure_lag(self) -> None:
        """Measure the lag, and check that the log still contains the entry after the position."""
        extent = await self._stream.extent()
        if extent.last < self.position:
            # Redis has restarted with an older state, or with a clock that is behind: others may have written to it.
            self._record_gap("shared_log_lost_entries")
            self.position, self.newest = OLDEST, -math.inf
        elif OLDEST < self.position < extent.first and not forgets_all(extent.first_fields):
            self._record_gap("shared_log_trimmed_before_read")
            self.position = OLDEST
        self._is_current = self.position >= extent.last
        first = max(extent.first.ms, self.position.ms)
        self._lag_s, self._measured = (extent.last.ms - first) / 1000, time.monotonic()

    def _record_gap(self, event: str) -> None:
        self._counters.gaps += 1
        self._logger.warning(event, advice="text that was forgotten meanwhile may remain here: forget it again")


def _weight(event: Event) -> int:
    return len(event.tokens) + (len(event.request) >> 2) + EVENT_WEIGHT
