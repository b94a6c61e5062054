"""From the outbox to Redis: many events an entry, many entries a round trip, until Redis has them."""

from __future__ import annotations

import asyncio
from typing import Any

from drafter_service.replication.counters import LogCounters
from drafter_service.replication.entry import encode
from drafter_service.replication.events import Dropped, Event, Finished, ForgottenBefore
from drafter_service.replication.outbox import Outbox
from drafter_service.replication.retry import Retry
from drafter_service.replication.stream import Addition, LogUnavailable, Stream

GATHER_S = 0.005
"""How long events wait for others to travel with."""
MEASURED_EVERY = 64
"""The log is measured, and trimmed if need be, whenever this part of its bound has been written."""


class Writer:
    """Publishes what is in an outbox."""

    def __init__(
        self, stream: Stream, outbox: Outbox, counters: LogCounters, logger: Any, *, name: bytes, max_bytes: int
    ) -> None:
        """`name`: what readers know it by. `max_bytes`: the bound of the log."""
        self._stream, self._outbox, self._counters = stream, outbox, counters
        self._logger = logger.bind(task="write")
        self._retry = Retry(self._logger, counters)
        self._name, self._max_bytes = name, max_bytes
        # Others may have left the log too large.
        self._unmeasured = max_bytes

    @property
    def is_connected(self) -> bool:
        """Whether the log took what was written last."""
        return not self._retry.is_failing

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._outbox.wait()
            await asyncio.sleep(GATHER_S)
            entries = self._outbox.take()
            additions = [_addition(events, self._name) for events in entries]
            await self._add(additions)
            self._count(entries)
            self._outbox.settle()
            self._unmeasured += sum(len(column) for addition in additions for column in addition.fields.values())
            if self._unmeasured >= self._max_bytes // MEASURED_EVERY:
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

    def _count(self, entries: list[list[Event]]) -> None:
        finished = [event for events in entries for event in events if isinstance(event, Finished)]
        self._counters.published_requests += len(finished)
        self._counters.published_tokens += sum(len(event.tokens) for event in finished)

    async def _trim(self) -> None:
        self._unmeasured = 0
        try:
            await self._stream.trim(self._max_bytes)
        except LogUnavailable as problem:
            self._counters.errors += 1
            self._logger.warning("shared_log_not_trimmed", error=str(problem))


def _addition(events: list[Event], writer: bytes) -> Addition:
    match events[0]:
        case ForgottenBefore(time=time):
            trim_before: float | None = time
        case Dropped():
            trim_before = float("inf")
        case _:
            trim_before = None
    return Addition(encode(events, writer), trim_before)
