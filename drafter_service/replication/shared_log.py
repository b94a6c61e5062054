"""The log of finished requests that replicas share: what one has learned, all learn.

A Redis Stream for each namespace. Every replica publishes what finishes with it and reads what others have published.
It reads from a position of its own, which is kept beside a snapshot, so that a new replica loads the snapshot and then
only the end of the log. Delivery is at least once, and duplicates are dropped by name. While Redis is away each replica
goes on alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import structlog

from drafter_service.replication.counters import LogCounters
from drafter_service.replication.events import Event, Finished
from drafter_service.replication.outbox import Outbox
from drafter_service.replication.reader import Reader
from drafter_service.replication.recent import Recent
from drafter_service.replication.stream import OLDEST, Position, Stream, connect
from drafter_service.replication.writer import Writer

MAX_BYTES = 256 << 20
"""Of a namespace's log in Redis: some 64 M tokens, four times a corpus of 16 M."""
OUTBOX_TOKENS = 4 << 20
"""Of a namespace, in memory, while Redis is away: 16 MB."""
FLUSH_S = 2.0

logger = structlog.get_logger(__name__)


class SharedLog:
    """The logs of all namespaces. Only the event loop may use it."""

    def __init__(
        self, url: str, *, prefix: str = "default", max_bytes: int = MAX_BYTES, outbox_tokens: int = OUTBOX_TOKENS
    ) -> None:
        """Nothing is sent yet.

        url: redis://, rediss:// or unix://, as redis-py reads them. prefix: replicas with the same one share their
        logs. max_bytes: of memory that Redis uses for a namespace, about. outbox_tokens: how many tokens of a namespace
        wait for Redis; the oldest requests are dropped for newer ones.

        Raises UserError for a URL that cannot be used, or where redis-py is not installed.
        """
        self._client = connect(url)
        self._prefix, self._max_bytes, self._outbox_tokens = prefix, max_bytes, outbox_tokens
        # Not one that outlives the process: after a restart what the last life published is to be read again, since
        # its snapshot may not hold it.
        self._name = secrets.token_bytes(8)

    def open(self, namespace: str) -> NamespaceLog:
        """The log of one namespace. Close it before this one."""
        stream = Stream(self._client, self._prefix, namespace)
        return NamespaceLog(
            stream,
            Outbox(self._outbox_tokens),
            logger.bind(namespace=namespace),
            name=self._name,
            max_bytes=self._max_bytes,
        )

    async def close(self) -> None:
        """Disconnect."""
        await self._client.aclose()


class NamespaceLog:
    """Both ends of one namespace's log."""

    def __init__(self, stream: Stream, outbox: Outbox, logger: Any, *, name: bytes, max_bytes: int) -> None:
        self.counters = LogCounters()
        self._stream, self._outbox, self._logger, self._name = stream, outbox, logger, name
        self._writer = Writer(stream, outbox, self.counters, logger, name=name, max_bytes=max_bytes)
        self._writing = asyncio.create_task(self._writer.run())

    @property
    def is_connected(self) -> bool:
        """Whether what was written last arrived."""
        return self._writer.is_connected

    @property
    def dropped_tokens(self) -> int:
        """Tokens that were never published, because too many waited."""
        return self._outbox.dropped_tokens

    def publish(self, event: Event) -> None:
        """Tell the other replicas, soon; tokens are copied. Neither waits nor fails."""
        if isinstance(event, Finished) and not len(event.tokens):
            return
        overflowed = self._outbox.is_overflowing
        self.counters.dropped += self._outbox.put(event)
        if self._outbox.is_overflowing and not overflowed:
            self._logger.warning("shared_log_drops_requests")

    async def flush(self) -> None:
        """Returns when Redis has all that was published until now. Waits as long as that takes."""
        await self._outbox.flush()

    def reader(self, after: Position = OLDEST, known: Iterable[int] = ()) -> Reader:
        """Reads what other replicas publish, from the entry after a position on.

        known: hashes (`ssd.corpus.requests.hash_of`) of names that were learned already, the newest last: the
        position of a snapshot is that of the last entry in it, and it may hold what lies behind that too.
        """
        return Reader(
            self._stream, Recent(self.counters, known), self.counters, self._logger, own=self._name, after=after
        )

    async def close(self) -> None:
        """Publish what waits, if that is possible soon, and stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self.flush()
        self._writing.cancel()
        await asyncio.wait([self._writing])
