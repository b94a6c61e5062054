"""From Redis to whoever learns: what other replicas have published, once and in order, no faster than it is taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from drafter_service.replication.counters import Lag, LogCounters
from drafter_service.replication.entry import decode
from drafter_service.replication.events import Event, Finished
from drafter_service.replication.recent import Recent
from drafter_service.replication.retry import Retry
from drafter_service.replication.stream import OLDEST, Extent, LogUnavailable, Position, Stream
from drafter_service.transport.wire import WireError

ENTRIES_AT_ONCE = 16
"""In one answer of Redis: with entries of usual size a megabyte."""
LOOKED_EVERY_S = 1.0

TakeEvents = Callable[[list[Event]], Awaitable[None]]


class Reader:
    """Reads the log of one namespace from a position on."""

    def __init__(
        self, stream: Stream, recent: Recent, counters: LogCounters, logger: Any, *, own: bytes, after: Position
    ) -> None:
        """`own`: the name of the writer whose entries are not handed on."""
        self._stream, self._recent, self._counters = stream, recent, counters
        self._logger = logger.bind(task="read")
        self._retry = Retry(self._logger, counters)
        self._own = own
        self.position = after
        """Of the last entry whose events were taken. A reader that begins here misses nothing."""
        self._lag, self._looked = Lag(0, 0.0), time.monotonic()
        self._has_all = False

    @property
    def is_connected(self) -> bool:
        """Whether the log answered when it was last asked."""
        return not self._retry.is_failing

    @property
    def lag(self) -> Lag:
        """How far it is behind. While Redis is away or events are being taken the seconds count on."""
        if self._has_all:
            return Lag(0, 0.0)
        return Lag(self._lag.entries, self._lag.seconds + time.monotonic() - self._looked)

    async def run(self, take: TakeEvents) -> None:
        """Hand on the events of each entry until cancelled; the next follow when `take` has returned.

        Tokens of the events are views of what was read. What `take` raises ends it.
        """
        while True:
            try:
                await self._look()
                while True:
                    await self._read(take)
            except LogUnavailable as problem:
                self._is_behind()
                await self._retry.pause(problem)

    async def _read(self, take: TakeEvents) -> None:
        entries = await self._stream.read(self.position, ENTRIES_AT_ONCE, wait=self._has_all)
        self._retry.succeeded()
        if entries:
            self._is_behind()
        malformed = 0
        for position, fields in entries:
            try:
                entry = decode(fields)
            except WireError:
                malformed += 1
            else:
                await self._hand_on(entry.writer, entry.events, take)
            self.position = position
        if malformed:
            self._counters.malformed += malformed
            self._logger.warning("shared_log_entries_malformed", entries=malformed)
        if len(entries) < ENTRIES_AT_ONCE:
            self._has_all = True
        if entries and time.monotonic() - self._looked > LOOKED_EVERY_S:
            await self._look()

    async def _hand_on(self, writer: bytes, events: list[Event], take: TakeEvents) -> None:
        # Own events are noted too: others may publish the same again.
        news = [event for event in events if self._recent.passes(event)]
        if writer == self._own or not news:
            await asyncio.sleep(0)
            return
        await take(news)
        finished = [event for event in news if isinstance(event, Finished)]
        self._counters.consumed_requests += len(finished)
        self._counters.consumed_tokens += sum(len(event.tokens) for event in finished)

    def _is_behind(self) -> None:
        if self._has_all:
            self._has_all, self._lag, self._looked = False, Lag(0, 0.0), time.monotonic()

    async def _look(self) -> None:
        """See how far it is behind, and whether the log still goes on where it stopped reading."""
        extent = await self._stream.extent()
        if extent.last < self.position:
            # Redis came back with an older state; what it kept of the log was read before.
            self._miss("shared_log_lost_entries")
            self.position = extent.last
        elif self.position != OLDEST and extent.first > self.position:
            self._miss("shared_log_trimmed_before_read")
            self.position = OLDEST
        self._has_all = self.position >= extent.last
        self._lag, self._looked = _lag(extent, self.position), time.monotonic()

    def _miss(self, event: str) -> None:
        self._counters.gaps += 1
        self._logger.warning(event)


def _lag(extent: Extent, position: Position) -> Lag:
    first = max(extent.first.ms, position.ms)
    behind_ms, spread_ms = extent.last.ms - first, extent.last.ms - extent.first.ms
    if position >= extent.last:
        return Lag(0, 0.0)
    entries = extent.entries if spread_ms == 0 else max(1, round(extent.entries * behind_ms / spread_ms))
    return Lag(entries, behind_ms / 1000)
