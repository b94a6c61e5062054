"""The Redis Stream of a namespace's log: calls and retries.

No other module calls Redis. Its errors contain only the type of the problem: errors of redis-py quote the data that was
sent, which is users' text, and URLs contain passwords.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from drafter_service.observability.report.schema import SharedLogReport
from ssd.errors import UserError, missing_extra

if TYPE_CHECKING:
    from redis.asyncio import Redis

BLOCK_S = 5.0
"""Maximum time that Redis blocks a read until there is a new entry."""
TIMEOUT_S = 10.0
"""Maximum time for an answer, including `BLOCK_S`; afterwards the connection is closed."""
PING_S = 1.0
MAX_CONNECTIONS = 10_000
"""A namespace has one connection for reading, and one while it writes."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
MAX_DOUBLINGS = 10
ALL_NODES = 0
SCHEMES = ("redis://", "rediss://", "unix://")


class LogUnavailable(Exception):  # noqa: N818 - a temporary state rather than an error
    """A call to Redis failed; the text is the type of the error."""


class LogPosition(NamedTuple):
    """The id of an entry. Entries are ordered by it."""

    ms: int
    """Milliseconds since 1970, by the clock of Redis."""
    number: int
    """Number within the millisecond."""

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> LogPosition:
        """Parse the result of `str`. Raises ValueError for anything else."""
        if not re.fullmatch("[0-9]{1,20}-[0-9]{1,20}", text):
            raise ValueError(f"{text!r} is not a position in a log")
        ms, number = text.split("-")
        return cls(int(ms), int(number))


OLDEST = LogPosition(0, 0)
"""The position before all entries."""


class Extent(NamedTuple):
    """Extent of a log."""

    first: LogPosition
    last: LogPosition
    """The newest entry ever added, even if it was trimmed; `OLDEST` if there was none."""
    first_fields: Mapping[bytes, bytes]
    """Fields of the first entry; none if there is no entry."""


def connect(url: str) -> Redis:
    """Return a client, which has not connected yet. Raises UserError for an unusable URL, or without redis-py."""
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise missing_extra("the shared log needs redis-py", "redis") from None
    if not url.startswith(SCHEMES):
        raise UserError(f"the URL of the shared log must begin with {', '.join(SCHEMES)}")
    try:
        client = Redis.from_url(
            url,
            protocol=2,
            # The callers retry.
            retry=Retry(NoBackoff(), 0),
            # The timeout of redis-py loses cancellations (asyncio.wait_for before Python 3.12).
            socket_timeout=None,
            socket_connect_timeout=TIMEOUT_S,
            max_connections=MAX_CONNECTIONS,
        )
        # Unknown options raise only here.
        client.connection_pool.make_connection()
    except Exception:
        raise UserError(
            "the URL of the shared log cannot be used; it has the form redis://[[user]:password@]host[:port][/database]"
        ) from None
    return client


async def ping(client: Redis) -> None:
    """Raise LogUnavailable if Redis does not answer within `PING_S`."""
    async with _redis_call(PING_S):
        await client.ping()


class RedisStream:
    """The log of one namespace. Every method raises LogUnavailable if Redis fails."""

    def __init__(self, client: Redis, prefix: str, namespace: str) -> None:
        self._client = client
        # In a cluster the part in braces determines the node of a key.
        self._key = f"ssd:{{{prefix}}}:{namespace}"

    async def add(self, entries: Sequence[Mapping[bytes, bytes]]) -> list[LogPosition]:
        """Add entries in order, and return their positions. After an error any subset may have been added."""
        async with _redis_call(TIMEOUT_S):
            pipeline = self._client.pipeline(transaction=False)
            for entry in entries:
                fields: dict[Any, Any] = {**entry}
                pipeline.xadd(self._key, fields)
            return [_position(answer) for answer in await pipeline.execute()]

    async def trim_before(self, moment: float, position: LogPosition) -> None:
        """Remove the entries before a position that were added before a time, in seconds since 1970."""
        async with _redis_call(TIMEOUT_S):
            oldest_kept = _oldest_kept(moment, position)
            await self._client.xtrim(self._key, minid=str(oldest_kept), approximate=False)

    async def read(
        self, after: LogPosition, most: int, *, wait: bool
    ) -> list[tuple[LogPosition, Mapping[bytes, bytes]]]:
        """Return the next entries, at most `most`. With `wait`, wait up to `BLOCK_S` if there are none."""
        block_ms = round(BLOCK_S * 1000) if wait else None
        async with _redis_call(TIMEOUT_S):
            after_it: dict[Any, Any] = {self._key: str(after)}
            answer: Any = await self._client.xread(after_it, count=most, block=block_ms)
            return [(_position(name), fields) for _key, entries in answer or () for name, fields in entries]

    async def extent(self) -> Extent:
        """Return the current extent of the log."""
        async with _redis_call(TIMEOUT_S):
            if not await self._client.exists(self._key):
                return Extent(OLDEST, OLDEST, {})
            info = await self._client.xinfo_stream(self._key)
            last = _position(info["last-generated-id"])
            first, fields = info["first-entry"] or (str(last), {})
            return Extent(_position(first), last, fields)

    async def trim(self, max_bytes: int) -> None:
        """Remove the oldest entries while the log uses more than `max_bytes` of memory."""
        async with _redis_call(TIMEOUT_S):
            while (entries := await self._client.xlen(self._key)) > 1:
                used = await self._client.memory_usage(self._key, samples=ALL_NODES)
                if not used or used <= max_bytes:
                    return
                # Sizes of entries differ, so one pass may remove too few.
                kept = max(1, int(entries * max_bytes / used))
                await self._client.xtrim(self._key, maxlen=kept, approximate=False)


def _position(name: bytes | str) -> LogPosition:
    return LogPosition.parse(name.decode() if isinstance(name, bytes) else name)


def _oldest_kept(trim_before: float, position: LogPosition) -> LogPosition:
    """Return the oldest entry to keep among those up to `position`, which is always kept."""
    if trim_before * 1000 > position.ms:
        return position
    return LogPosition(int(max(0.0, trim_before * 1000)), 0)


@asynccontextmanager
async def _redis_call(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except Exception as problem:
        raise LogUnavailable(type(problem).__name__) from None


class Retry:
    """Retries of one task with exponential pauses. The first failure and the recovery are logged."""

    def __init__(self, logger: Any, counters: SharedLogReport) -> None:
        """Start without failures; logger: a structlog logger bound to the task."""
        self._logger, self._counters = logger, counters
        self._failures = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    async def pause(self, problem: Exception) -> None:
        """Record a failed attempt, and wait until the next one. Every exception but LogUnavailable is logged."""
        if not isinstance(problem, LogUnavailable):
            self._logger.error("shared_log_task_failed", exc_info=problem)
        elif self._failures == 0:
            self._logger.warning("shared_log_unavailable", error=str(problem))
        self._counters.errors += 1
        longest = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures, MAX_DOUBLINGS))
        self._failures += 1
        await asyncio.sleep(random.uniform(0.5, 1) * longest)

    def succeeded(self) -> None:
        """Record a successful attempt."""
        if self._failures:
            self._logger.info("shared_log_available", attempts=self._failures)
        self._failures = 0
