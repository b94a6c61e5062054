"""Read the events that other sidecars published, in order, no faster than they are learned.

Entries are read twice if the answer to a writer was lost; the namespace learns a name once. A sidecar that was
disconnected may publish a request after another one has forgotten it; the namespace does not learn it either.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from drafter_service.observability.report.schema import SharedLogReport
from drafter_service.replication.events import LogEntry, decode
from drafter_service.replication.redis_stream import OLDEST, LogPosition, LogUnavailable, RedisStream, Retry
from drafter_service.transport.wire import WireError

ENTRIES_AT_ONCE = 16
"""Entries per answer of Redis: about one megabyte at the usual size."""
LAG_INTERVAL_S = 1.0
"""Interval between measurements of the lag."""

TakeEntry = Callable[[LogEntry], Awaitable[None]]


class Reader:
    """Reads the log of one namespace, starting after a position."""

    def __init__(
        self,
        stream: RedisStream,
        counters: SharedLogReport,
        logger: Any,
        *,
        after: LogPosition,
    ) -> None:
        """Make a reader that does not read yet."""
        self._stream, self._counters = stream, counters
        self._logger = logger.bind(task="read")
        self._retry = Retry(self._logger, counters)
        self.position = after
        """Position of the last entry whose events were passed on. A reader that starts here misses nothing."""
        self._lag_s, self._measured = 0.0, time.monotonic()
        self._is_current = False

    @property
    def is_connected(self) -> bool:
        """Whether the last call to the log succeeded."""
        return not self._retry.is_failing

    @property
    def lag_s(self) -> float:
        """Seconds behind the newest entry. They grow while Redis is unavailable or events are being learned."""
        return 0.0 if self._is_current else self._lag_s + time.monotonic() - self._measured

    async def run(self, take: TakeEntry) -> None:
        """Pass each entry to `take`, one call at a time, until cancelled.

        Tokens of its events are views of what was read. An exception of `take` ends the reader.
        """
        while True:
            try:
                await self._measure_lag()
                while True:
                    await self._read(take)
            except LogUnavailable as problem:
                self._record_lag()
                await self._retry.pause(problem)

    async def _read(self, take: TakeEntry) -> None:
        entries = await self._stream.read(self.position, ENTRIES_AT_ONCE, wait=self._is_current)
        self._retry.succeeded()
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
            self.position = position
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
            # Redis has restarted with an older state, whose entries have all been read.
            self._record_gap("shared_log_lost_entries")
            self.position = extent.last
        elif self.position != OLDEST and extent.first > self.position:
            self._record_gap("shared_log_trimmed_before_read")
            self.position = OLDEST
        self._is_current = self.position >= extent.last
        first = max(extent.first.ms, self.position.ms)
        self._lag_s, self._measured = (extent.last.ms - first) / 1000, time.monotonic()

    def _record_gap(self, event: str) -> None:
        self._counters.gaps += 1
        self._logger.warning(event)
