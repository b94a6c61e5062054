"""The Redis Stream that holds the log of one namespace.

The only place that knows Redis. Its errors say what kind of thing went wrong and nothing more: those of the client
quote what was sent, which is users' text, and URLs hold passwords.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ssd.errors import UserError

if TYPE_CHECKING:
    from redis.asyncio import Redis

BLOCK_S = 5.0
"""How long Redis may keep a read waiting for something new."""
TIMEOUT_S = 10.0
"""How long an answer may take, `BLOCK_S` included, before the connection is given up."""
MOST_CONNECTIONS = 10_000
"""A namespace has one for reading and, while it writes, one for that."""
ALL_NODES = 0
SCHEMES = ("redis://", "rediss://", "unix://")


class LogUnavailable(Exception):  # noqa: N818 - it is a state of the world that passes
    """Redis did not do what it was asked to; the text is the kind of error."""


class Position(NamedTuple):
    """The id of an entry; entries are in its order."""

    ms: int
    """By the clock of Redis, since 1970."""
    number: int
    """Within the millisecond."""

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Raises ValueError for what `str` does not make of a position."""
        if not re.fullmatch("[0-9]{1,20}-[0-9]{1,20}", text):
            raise ValueError(f"{text!r} is no position in a log")
        ms, number = text.split("-")
        return cls(int(ms), int(number))


OLDEST = Position(0, 0)
"""Before all entries."""


class Extent(NamedTuple):
    """What a log holds."""

    first: Position
    last: Position
    """The newest entry that there ever was, kept or not; `OLDEST` where there was none."""
    entries: int


class Addition(NamedTuple):
    """An entry to add."""

    fields: dict[bytes, bytes]
    trim_before: float | None = None
    """Entries before it that were added before this time, in seconds, are trimmed."""


def connect(url: str) -> Redis:
    """A client; nothing is sent yet. Raises UserError for a URL that cannot be used, or where redis-py is missing."""
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise UserError("the shared log needs redis-py; run: pip install 'ssd-drafter[redis]'") from None
    if not url.startswith(SCHEMES):
        raise UserError(f"the URL of the shared log must begin with {', '.join(SCHEMES)}")
    try:
        client = Redis.from_url(
            url,
            protocol=2,
            # Whoever asks decides about trying again.
            retry=Retry(NoBackoff(), 0),
            # Its own timeout loses cancellations (asyncio.wait_for before Python 3.12).
            socket_timeout=None,
            socket_connect_timeout=TIMEOUT_S,
            max_connections=MOST_CONNECTIONS,
        )
        # Options that it does not know come to light only here.
        client.connection_pool.make_connection()
    except Exception:
        raise UserError(
            "the URL of the shared log cannot be used; it has the form redis://[[user]:password@]host[:port][/database]"
        ) from None
    return client


class Stream:
    """The log of one namespace. Every method raises LogUnavailable when Redis fails it."""

    def __init__(self, client: Redis, prefix: str, namespace: str) -> None:
        self._client = client
        # In a cluster the part in braces decides which node holds a key.
        self._key = f"ssd:{{{prefix}}}:{namespace}"

    async def add(self, additions: Sequence[Addition]) -> None:
        """Add entries in order. After an error any of them may have been added."""
        async with _asking_redis():
            pipeline = self._client.pipeline(transaction=False)
            for addition in additions:
                fields: dict[Any, Any] = {**addition.fields}
                pipeline.xadd(self._key, fields)
            positions = [_position(answer) for answer in await pipeline.execute()]
            for addition, position in zip(additions, positions, strict=True):
                if addition.trim_before is not None:
                    oldest_kept = _oldest_kept(addition.trim_before, position)
                    await self._client.xtrim(self._key, minid=str(oldest_kept), approximate=False)

    async def read(self, after: Position, most: int, *, wait: bool) -> list[tuple[Position, Mapping[bytes, bytes]]]:
        """The next entries. Where there are none, none, after waiting up to `BLOCK_S` for one if so told."""
        block_ms = round(BLOCK_S * 1000) if wait else None
        async with _asking_redis():
            after_it: dict[Any, Any] = {self._key: str(after)}
            answer: Any = await self._client.xread(after_it, count=most, block=block_ms)
            return [(_position(name), fields) for _key, entries in answer or () for name, fields in entries]

    async def extent(self) -> Extent:
        """What the log holds now."""
        async with _asking_redis():
            if not await self._client.exists(self._key):
                return Extent(OLDEST, OLDEST, 0)
            info = await self._client.xinfo_stream(self._key)
            last = _position(info["last-generated-id"])
            first = _position(info["first-entry"][0]) if info["first-entry"] else last
            return Extent(first, last, info["length"])

    async def trim(self, max_bytes: int) -> None:
        """Take the oldest entries out of a log that uses more memory than it may."""
        async with _asking_redis():
            while (entries := await self._client.xlen(self._key)) > 1:
                used = await self._client.memory_usage(self._key, samples=ALL_NODES)
                if not used or used <= max_bytes:
                    return
                # By their number: the oldest may be smaller than others, then there is more to take.
                kept = max(1, int(entries * max_bytes / used))
                await self._client.xtrim(self._key, maxlen=kept, approximate=False)


def _position(name: bytes | str) -> Position:
    return Position.parse(name.decode() if isinstance(name, bytes) else name)


def _oldest_kept(trim_before: float, position: Position) -> Position:
    """What of the entries up to `position` is kept: always the last one, whatever the clocks say."""
    if trim_before * 1000 > position.ms:
        return position
    return Position(max(0, int(trim_before * 1000)), 0)


@asynccontextmanager
async def _asking_redis() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except Exception as problem:
        raise LogUnavailable(type(problem).__name__) from None
