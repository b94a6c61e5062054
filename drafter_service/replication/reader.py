"""Read the events that other replicas published, each once and in order, no faster than they are learned.

Entries are read twice if the answer to a writer was lost, and a replica that was disconnected may publish a request
after another one has forgotten it. `RecentNames` filters both.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from drafter_service.replication.events import Dropped, Event, Finished, Forgotten, ForgottenBefore, decode
from drafter_service.replication.redis_stream import (
    OLDEST,
    LogCounters,
    LogPosition,
    LogUnavailable,
    RedisStream,
    Retry,
)
from drafter_service.transport.wire import WireError
from ssd.corpus.requests import NO_NAME, hash_of

ENTRIES_AT_ONCE = 16
"""Entries per answer of Redis: about one megabyte at the usual size."""
LAG_INTERVAL_S = 1.0
"""Interval between measurements of the lag."""
MAX_NAMES = 1 << 16
"""Number of names that are kept, about 10 MB. Duplicates are at most one outbox apart, some thousand requests."""

TakeEvents = Callable[[list[Event]], Awaitable[None]]


class Reader:
    """Reads the log of one namespace, starting after a position."""

    def __init__(
        self,
        stream: RedisStream,
        recent: RecentNames,
        counters: LogCounters,
        logger: Any,
        *,
        own: bytes,
        after: LogPosition,
    ) -> None:
        """Make a reader that skips the entries of the replica named `own`."""
        self._stream, self._recent, self._counters = stream, recent, counters
        self._logger = logger.bind(task="read")
        self._retry = Retry(self._logger, counters)
        self._own = own
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

    async def run(self, take: TakeEvents) -> None:
        """Pass the events of each entry to `take`, one call at a time, until cancelled.

        Tokens of the events are views of the entry. An exception of `take` ends the reader.
        """
        while True:
            try:
                await self._measure_lag()
                while True:
                    await self._read(take)
            except LogUnavailable as problem:
                self._record_lag()
                await self._retry.pause(problem)

    async def _read(self, take: TakeEvents) -> None:
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
                await self._pass_on(entry.writer, entry.events, take)
            self.position = position
        if malformed:
            self._counters.malformed += malformed
            self._logger.warning("shared_log_entries_malformed", entries=malformed)
        if len(entries) < ENTRIES_AT_ONCE:
            self._is_current = True
        if entries and time.monotonic() - self._measured > LAG_INTERVAL_S:
            await self._measure_lag()

    async def _pass_on(self, writer: bytes, events: list[Event], take: TakeEvents) -> None:
        # Own events are recorded, too: other replicas may publish the same requests.
        new = [event for event in events if self._recent.is_new(event)]
        if writer == self._own or not new:
            await asyncio.sleep(0)
            return
        await take(new)
        self._counters.consumed_tokens += sum(len(event.tokens) for event in new if isinstance(event, Finished))

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


class RecentNames:
    """Hashes of the names that were most recently learned and forgotten."""

    def __init__(self, counters: LogCounters, known: Iterable[int] = ()) -> None:
        """Start with `known`: hashes (`ssd.corpus.requests.hash_of`) of names that have been learned, newest last."""
        self._counters = counters
        self._learned: OrderedDict[int, None] = OrderedDict()
        self._forgotten: OrderedDict[int, float] = OrderedDict()
        self._before = -math.inf
        for name in known:
            self._learn(name)

    def is_new(self, event: Event) -> bool:
        """Return whether an event that was read is new, and remember it."""
        match event:
            case Finished(request=request, time=time):
                return self._is_new_request(hash_of(request or None), time)
            case Forgotten(request=request, time=time):
                name = hash_of(request)
                self._learned.pop(name, None)
                self._forgotten[name] = max(time, self._forgotten.pop(name, time))
                _limit(self._forgotten)
            case ForgottenBefore(time=time):
                self._before = max(self._before, time)
            case Dropped(time=time):
                self._before = max(self._before, time)
                self._learned.clear()
        return True

    def _is_new_request(self, name: int, time: float) -> bool:
        if time < self._before or time <= self._forgotten.get(name, -math.inf):
            return False
        if name in self._learned:
            self._learned.move_to_end(name)
            self._counters.duplicates += 1
            return False
        self._learn(name)
        return True

    def _learn(self, name: int) -> None:
        if name != NO_NAME:
            self._learned[name] = None
            _limit(self._learned)


def _limit(names: OrderedDict[int, None] | OrderedDict[int, float]) -> None:
    if len(names) > MAX_NAMES:
        names.popitem(last=False)
