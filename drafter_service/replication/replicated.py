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
from drafter_service.replication.events import Kind, LogEntry
from drafter_service.replication.redis_stream import (
    OLDEST,
    LogPosition,
    LogUnavailable,
    RedisStream,
    connect,
    ping,
)
from drafter_service.replication.shared_log import NamespaceLog, Reader
from drafter_service.server.namespace import Namespace
from drafter_service.settings.tree import LogConfig

if TYPE_CHECKING:
    from redis.asyncio import Redis

BYTES_PER_TOKEN = 4
"""Size of a token in the log, in bytes."""

logger = structlog.get_logger(__name__)


class Replication:
    """Publishes what this sidecar learns, and learns what others publish. Only the event loop uses it."""

    def __init__(self, config: LogConfig) -> None:
        """Make a client of the shared log, if one is configured; it has not connected yet.

        Raises UserError for an unusable URL, or without redis-py.
        """
        self._config = config
        self._client: Redis | None = None if config.url is None else connect(config.url)
        # A restarted process has another name, so that it reads the entries that it published before: its snapshot may
        # not contain them.
        self._name = secrets.token_bytes(8)
        self._replicated: dict[str, ReplicatedNamespace] = {}
        self._closing: dict[ReplicatedNamespace, asyncio.Task[None]] = {}
        self._past = SharedLogReport(is_connected=True)
        """Totals of namespaces that were unloaded."""

    async def start(self) -> None:
        """Log a warning if there is a shared log that does not answer; its namespaces keep trying to connect."""
        if self._client is not None:
            try:
                await ping(self._client)
            except LogUnavailable as problem:
                logger.warning("shared_log_unavailable", error=str(problem))

    async def stop(self) -> None:
        """Disconnect, after all namespaces have been removed."""
        await asyncio.gather(*self._closing.values())
        if self._client is not None:
            await self._client.aclose()

    def add(self, namespace: Namespace) -> None:
        """Start replicating a namespace that was loaded, if there is a shared log."""
        if self._client is not None:
            stream = RedisStream(self._client, self._config.prefix, namespace.name)
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
        total = self._past
        for replicated in (*self._replicated.values(), *self._closing):
            total = _sum(total, replicated.facts())
        return total


class ReplicatedNamespace:
    """The replication of one namespace."""

    def __init__(self, namespace: Namespace, stream: RedisStream, name: bytes, max_bytes: int) -> None:
        """name: identifies this sidecar in the log. max_bytes: maximum size of the log."""
        bound = logger.bind(namespace=namespace.name)
        self._namespace, self._log = namespace, NamespaceLog(stream, bound, name=name, max_bytes=max_bytes)
        self._name = name
        reader = Reader(stream, self._log.counters, bound, after=_position(namespace))
        # The namespace must not refer to this object: a cycle would keep an unloaded corpus in memory.
        namespace.log_position = lambda: str(reader.position)
        namespace.publish, namespace.is_published = self._log.publish, self._log.is_published
        namespace.has_unpublished = self._log.has_unpublished
        self._reader = reader
        self._reading = asyncio.get_running_loop().create_task(reader.run(self._take))
        self._reading.add_done_callback(self._log_failure)

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
        namespace, counters = self._namespace, self._log.counters
        events = entry.events
        if entry.writer == self._name:
            # A namespace that was dropped or unloaded since does not know what its own entries forget.
            events = [
                event for event in events if event.kind is not Kind.FINISHED and not namespace.has_forgotten(event)
            ]
            await asyncio.sleep(0)
        for event in events:
            await namespace.wait_for_room()
            match event.kind:
                case Kind.FINISHED:
                    name, time = event.request or None, event.time
                    if namespace.learn(event.tokens, name, event.tag, finished_at=time, is_from_log=True):
                        counters.consumed_tokens += len(event.tokens)
                    elif namespace.has_learned(name):
                        counters.duplicates += 1
                case Kind.FORGOTTEN:
                    namespace.forget(event.request, logged_at=event.time)
                case _:
                    namespace.forget_before(event.time, is_from_log=True)

    def _log_failure(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and reading.exception() is not None:
            logger.error("reading the shared log failed", namespace=self._namespace.name, exc_info=reading.exception())


def _position(namespace: Namespace) -> LogPosition:
    """Return the reading position of a namespace's snapshot; the oldest entry if there is none."""
    try:
        return LogPosition.parse(namespace.restored_position) if namespace.restored_position else OLDEST
    except ValueError:
        return OLDEST


def _sum(first: SharedLogReport, second: SharedLogReport) -> SharedLogReport:
    totals = {name: getattr(first, name) + getattr(second, name) for name in vars(first)}
    is_connected = first.is_connected and second.is_connected
    return SharedLogReport(**totals | {"is_connected": is_connected, "lag_s": max(first.lag_s, second.lag_s)})
