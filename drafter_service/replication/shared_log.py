"""The log of finished requests that replicas share, a Redis Stream for each namespace.

Every replica publishes the requests that finish with it and learns those that others published. Its reading position is
stored with its snapshot, so a new replica loads a snapshot and reads only the rest of the log. Delivery is at least
once, and duplicates are dropped by name. While Redis is unavailable each replica continues alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import structlog

from drafter_service.replication.events import Event, Finished
from drafter_service.replication.reader import Reader, RecentNames
from drafter_service.replication.redis_stream import (
    LogCounters,
    LogPosition,
    LogUnavailable,
    RedisStream,
    connect,
    ping,
)
from drafter_service.replication.writer import Outbox, Writer
from drafter_service.settings.tree import LogConfig

BYTES_PER_TOKEN = 4
"""Size of a token in the log, in bytes."""
FLUSH_S = 2.0
QUEUE_TOKENS = 4_000_000
"""Maximum number of tokens of a namespace that wait while the log is unreachable; the oldest requests are dropped
first."""

logger = structlog.get_logger(__name__)


class SharedLog:
    """The logs of all namespaces. Only the event loop may use it."""

    def __init__(self, url: str, config: LogConfig) -> None:
        """Create the client, which has not connected yet.

        url: redis://, rediss:// or unix://, as redis-py reads them. config: the other settings of the log.

        Raises UserError for an unusable URL, or without redis-py.
        """
        self._client = connect(url)
        self._config = config
        # A restarted process has another name, so that it reads the entries that it published before: its snapshot may
        # not contain them.
        self._name = secrets.token_bytes(8)

    async def check(self) -> None:
        """Log a warning if Redis does not answer; the logs of namespaces keep trying to connect."""
        try:
            await ping(self._client)
        except LogUnavailable as problem:
            logger.warning("shared_log_unavailable", error=str(problem))

    def open(self, namespace: str) -> NamespaceLog:
        """Open the log of one namespace. Close it before closing this object."""
        stream = RedisStream(self._client, self._config.prefix, namespace)
        return NamespaceLog(
            stream,
            Outbox(QUEUE_TOKENS),
            logger.bind(namespace=namespace),
            name=self._name,
            max_bytes=BYTES_PER_TOKEN * self._config.max_tokens,
        )

    async def close(self) -> None:
        """Disconnect."""
        await self._client.aclose()


class NamespaceLog:
    """Writer and reader of one namespace's log."""

    def __init__(self, stream: RedisStream, outbox: Outbox, logger: Any, *, name: bytes, max_bytes: int) -> None:
        self.counters = LogCounters()
        self._stream, self._outbox, self._logger, self._name = stream, outbox, logger, name
        self._writer = Writer(stream, outbox, self.counters, logger, name=name, max_bytes=max_bytes)
        self._writing = asyncio.create_task(self._writer.run())

    @property
    def is_connected(self) -> bool:
        """Whether the last write succeeded."""
        return self._writer.is_connected

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
