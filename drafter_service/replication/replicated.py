"""Synchronize namespaces with other sidecars through a shared log: a Redis Stream for each namespace.

Every sidecar publishes the requests that finish with it and learns those that others published. Its reading position is
stored with its snapshot, so a new sidecar loads a snapshot and reads only the rest of the log. Delivery is at least
once, and duplicates are dropped by name. While Redis is unavailable each sidecar continues alone.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import structlog

from drafter_service.observability.report.schema import SharedLogReport
from drafter_service.replication.events import Event, Kind, LogEntry, forgets
from drafter_service.replication.redis_stream import (
    OLDEST,
    LogPosition,
    LogUnavailable,
    RedisStream,
    connect,
    ping,
)
from drafter_service.replication.shared_log import ENTRIES_AT_ONCE, NamespaceLog, Reader
from drafter_service.server.namespace import Namespace
from drafter_service.settings.tree import LogConfig
from ssd.corpus.ring import has_invalid_token

if TYPE_CHECKING:
    from redis.asyncio import Redis

BYTES_PER_TOKEN = 4
"""Size of a token in the log, in bytes."""
EVENTS_PER_TURN = 32
"""Number of events that are applied before other tasks of the event loop run."""
TICK_S = 1e-6
"""Resolution of times. Today's have one of 2.4e-7 s as floats."""

logger = structlog.get_logger(__name__)


class Replication:
    """Publishes what this sidecar learns, and learns what others publish. Only the event loop uses it."""

    def __init__(self, config: LogConfig) -> None:
        """Make a client of the shared log, if one is configured; it has not connected yet.

        Raises UserError for an unusable URL, or without redis-py.
        """
        self._config = config
        self._client: Redis | None = None if config.url is None else connect(config.url)
        # A restarted process has another name: its snapshot may contain what entries that it published before forget.
        self._name = secrets.token_bytes(8)
        self._replicated: dict[str, ReplicatedNamespace] = {}
        self._closing: dict[ReplicatedNamespace, asyncio.Task[None]] = {}
        self._past = SharedLogReport(is_connected=True)
        """Totals of namespaces that were unloaded."""
        self._has_answered = True
        """Whether the log answered when `answers` was last called."""
        self._examined: dict[str, LogPosition] = {}
        """Positions up to which `forgets` has found nothing, by namespace."""

    async def answers(self) -> bool:
        """Return whether there is a shared log that answers; log a warning if it does not any more."""
        if self._client is None:
            return False
        try:
            await ping(self._client)
        except LogUnavailable as problem:
            if self._has_answered:
                logger.warning("shared_log_unavailable", error=str(problem))
            self._has_answered = False
        else:
            self._has_answered = True
        return self._has_answered

    async def forgets(self, name: str, position: str | None) -> bool:
        """Return whether the log of a namespace has events after a position that forget text, or may have had some.

        position: that of the namespace's snapshot; None: before all entries. Entries are read once, in later calls only
        those that are new. Raises LogUnavailable.
        """
        assert self._client is not None
        stream = RedisStream(self._client, self._config.prefix, name)
        after = max(_parsed(position), self._examined.pop(name, OLDEST))
        extent = await stream.extent()
        if extent.last < after or OLDEST < after < extent.first:
            return True
        while after < extent.last and (entries := await stream.read(after, ENTRIES_AT_ONCE, wait=False)):
            if any(forgets(fields) for _, fields in entries):
                return True
            after, _ = entries[-1]
        self._examined[name] = after
        return False

    async def stop(self) -> None:
        """Disconnect, after all namespaces have been removed."""
        await asyncio.gather(*self._closing.values())
        if self._client is not None:
            await self._client.aclose()

    def add(self, namespace: Namespace) -> None:
        """Start replicating a namespace that was loaded, if there is a shared log."""
        if self._client is not None:
            stream = RedisStream(self._client, self._config.prefix, namespace.name)
            self._examined.pop(namespace.name, None)
            max_bytes = BYTES_PER_TOKEN * self._config.max_tokens
            self._replicated[namespace.name] = ReplicatedNamespace(namespace, stream, self._name, max_bytes)

    def remove(self, namespace: Namespace) -> None:
        """Stop replicating a namespace that is unloaded."""
        replicated = self._replicated.pop(namespace.name, None)
        if replicated is not None:
            self._closing[replicated] = asyncio.get_running_loop().create_task(self._close(replicated))

    async def _close(self, replicated: ReplicatedNamespace) -> None:
        await replicated.close()
        del self._closing[replicated]
        self._past = _sum(self._past, replicated.facts().model_copy(update={"is_connected": True, "lag_s": 0.0}))

    def facts(self) -> SharedLogReport | None:
        """Return the state of the log; None without one."""
        if self._client is None:
            return None
        used = (*self._replicated.values(), *self._closing)
        total = self._past if used else self._past.model_copy(update={"is_connected": self._has_answered})
        for replicated in used:
            total = _sum(total, replicated.facts())
        return total


class ReplicatedNamespace:
    """The replication of one namespace."""

    def __init__(self, namespace: Namespace, stream: RedisStream, name: bytes, max_bytes: int) -> None:
        """name: identifies this sidecar in the log. max_bytes: maximum size of the log."""
        bound = logger.bind(namespace=namespace.name)
        self._namespace, self._log = namespace, NamespaceLog(stream, bound, name=name, max_bytes=max_bytes)
        self._name = name
        reader = Reader(stream, self._log.counters, bound, after=_parsed(namespace.restored_position))
        if reader.position != OLDEST:
            reader.newest = namespace.newest_time
        # The namespace must not refer to this object: a cycle would keep an unloaded corpus in memory.
        namespace.log_position, namespace.has_read_log = lambda: str(reader.position), lambda: reader.is_current
        namespace.publish, namespace.is_published = self._log.publish, self._log.is_published
        namespace.has_unpublished = self._log.has_unpublished
        self._reader = reader
        self._fits = True
        """Whether all entries so far have tokens of the namespace's vocabulary."""
        self._reading = asyncio.get_running_loop().create_task(reader.run(self._take))

    async def close(self) -> None:
        """Publish waiting events if that takes little time, and stop."""
        self._reading.cancel()
        await asyncio.wait([self._reading])
        # The frames of the cancelled task refer to this object, and so to the corpus.
        del self._reading
        await self._log.close()

    def facts(self) -> SharedLogReport:
        """Return the state of this namespace's log."""
        is_connected = self._log.is_connected and self._reader.is_connected
        return self._log.counters.model_copy(update={"is_connected": is_connected, "lag_s": self._reader.lag_s})

    async def _take(self, entry: LogEntry) -> None:
        # A namespace that was dropped, unloaded or set aside since does not know what its own entries teach and forget.
        is_own, fits = entry.writer == self._name, self._check_vocabulary(entry)
        for index, event in enumerate(entry.events):
            if index % EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
            await self._namespace.wait_for_room()
            if event.kind is not Kind.FINISHED:
                self._forget(event, is_own)
            elif fits:
                self._learn(event, is_own)

    def _learn(self, event: Event, is_own: bool) -> None:
        namespace, counters, name = self._namespace, self._log.counters, event.request or None
        if namespace.learn(event.tokens, name, event.tag, finished_at=event.time, is_from_log=True):
            counters.consumed_tokens += len(event.tokens)
        elif not is_own and namespace.has_learned(name):
            counters.duplicates += 1

    def _forget(self, event: Event, is_own: bool) -> None:
        moment = event.time
        if event.kind is Kind.DROPPED:
            # Clocks differ: text of an earlier entry may have a later time.
            moment = max(moment, self._reader.newest + TICK_S)
        if is_own and self._namespace.has_forgotten(event._replace(time=moment)):
            return
        if event.kind is Kind.FORGOTTEN:
            self._namespace.forget(event.request, logged_at=event.time)
        else:
            self._namespace.forget_before(moment, logged_at=event.time)

    def _check_vocabulary(self, entry: LogEntry) -> bool:
        """Return whether the tokens are of the namespace's vocabulary, as far as it is known; count it if not."""
        vocab_size = self._namespace.model.vocab_size
        if not vocab_size or not any(has_invalid_token(event.tokens, vocab_size) for event in entry.events):
            return True
        self._log.counters.malformed += 1
        if self._fits:
            self._fits = False
            logger.warning("shared_log_has_another_vocabulary", namespace=self._namespace.name, vocab_size=vocab_size)
        return False


def _parsed(position: str | None) -> LogPosition:
    """Return the reading position of a namespace's snapshot; the oldest entry if there is none."""
    try:
        return LogPosition.parse(position) if position else OLDEST
    except ValueError:
        return OLDEST


def _sum(first: SharedLogReport, second: SharedLogReport) -> SharedLogReport:
    totals = {name: getattr(first, name) + getattr(second, name) for name in vars(first)}
    is_connected = first.is_connected and second.is_connected
    return SharedLogReport(**totals | {"is_connected": is_connected, "lag_s": max(first.lag_s, second.lag_s)})
