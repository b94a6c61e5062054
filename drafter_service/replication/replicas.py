"""Synchronize namespaces with other replicas through a shared log: a Redis Stream for each namespace.

Every replica publishes the requests that finish with it and learns those that others published. Its reading position is
stored with its snapshot, so a new replica loads a snapshot and reads only the rest of the log. Delivery is at least
once, and duplicates are dropped by name. While Redis is unavailable each replica continues alone.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import structlog

from drafter_service.observability.report.schema import SharedLogReport
from drafter_service.replication.events import Event, Finished, Forgotten
from drafter_service.replication.redis_stream import (
    OLDEST,
    LogPosition,
    LogUnavailable,
    RedisStream,
    connect,
    ping,
)
from drafter_service.replication.shared_log import NamespaceLog
from drafter_service.server.namespace import Namespace
from drafter_service.settings.tree import LogConfig

if TYPE_CHECKING:
    from redis.asyncio import Redis

BYTES_PER_TOKEN = 4
"""Size of a token in the log, in bytes."""

logger = structlog.get_logger(__name__)


class Replication:
    """Publishes what this replica learns, and learns what others publish. Only the event loop uses it."""

    def __init__(self, config: LogConfig) -> None:
        """Make a client of the shared log, if one is configured; it has not connected yet.

        Raises UserError for an unusable URL, or without redis-py.
        """
        self._config = config
        self._client: Redis | None = None if config.url is None else connect(config.url)
        # A restarted process has another name, so that it reads the entries that it published before: its snapshot may
        # not contain them.
        self._name = secrets.token_bytes(8)
        self._replicas: dict[str, Replica] = {}
        self._closing: set[asyncio.Task[None]] = set()
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
        await asyncio.gather(*self._closing)
        if self._client is not None:
            await self._client.aclose()

    def open(self, namespace: str) -> NamespaceLog | None:
        """Open the log of one namespace; None if none is configured. Close it before `stop`."""
        if self._client is None:
            return None
        stream = RedisStream(self._client, self._config.prefix, namespace)
        max_bytes = BYTES_PER_TOKEN * self._config.max_tokens
        return NamespaceLog(stream, logger.bind(namespace=namespace), name=self._name, max_bytes=max_bytes)

    def add(self, namespace: Namespace) -> None:
        """Start replicating a namespace that was loaded."""
        if (log := self.open(namespace.name)) is not None:
            self._replicas[namespace.name] = Replica(namespace, log)

    def remove(self, namespace: Namespace) -> None:
        """Stop replicating a namespace that is unloaded."""
        replica = self._replicas.pop(namespace.name, None)
        if replica is not None:
            self._past = _sum(self._past, replica.facts().model_copy(update={"is_connected": True, "lag_s": 0.0}))
            task = asyncio.get_running_loop().create_task(replica.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def facts(self) -> SharedLogReport | None:
        """Return the state of the log; None without one."""
        if self._client is None:
            return None
        total = self._past
        for replica in self._replicas.values():
            total = _sum(total, replica.facts())
        return total


class Replica:
    """The replication of one namespace."""

    def __init__(self, namespace: Namespace, log: NamespaceLog) -> None:
        self._namespace, self._log = namespace, log
        self._reader = reader = log.reader(_position(namespace), namespace.learned_names())
        # The namespace must not refer to this object: a cycle would keep an unloaded corpus in memory.
        namespace.log_position = lambda: str(reader.position)
        namespace.publish = log.publish
        self._reading = asyncio.get_running_loop().create_task(self._reader.run(self._take))
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
        return SharedLogReport(
            **vars(self._log.counters),
            is_connected=self._log.is_connected and self._reader.is_connected,
            lag_s=self._reader.lag_s,
        )

    async def _take(self, events: list[Event]) -> None:
        for event in events:
            await self._namespace.wait_for_room()
            match event:
                case Finished(request, tokens, finished_at, tag):
                    self._namespace.learn(tokens, request or None, tag, finished_at=finished_at, is_from_log=True)
                case Forgotten(request):
                    self._namespace.forget(request, is_from_log=True)
                case _:
                    self._namespace.forget_before(event.time, is_from_log=True)

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
