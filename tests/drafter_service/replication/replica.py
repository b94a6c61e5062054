"""A sidecar's part of a shared log: publishes events, and records those that it reads."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager

import numpy as np
import structlog

from drafter_service.replication.events import Event, Kind
from drafter_service.replication.redis_stream import OLDEST, RedisStream, connect
from drafter_service.replication.shared_log import NamespaceLog, Reader

TIMEOUT_S = 60.0


def request(name, *tokens, time=1.0):
    """Return a finished request."""
    return Event(Kind.FINISHED, time, name, np.array(tokens or (1, 2, 3), np.uint32))


def forgotten(name, time):
    """Return the command to forget a request."""
    return Event(Kind.FORGOTTEN, time, name)


async def eventually(condition):
    """Wait until a condition holds."""
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0)


class Replica:
    """Publishes events, and after `read` records the events of others."""

    def __init__(self, stream, max_bytes):
        self._stream, self._name, self._logger = stream, secrets.token_bytes(8), structlog.get_logger()
        self.log = NamespaceLog(stream, self._logger, name=self._name, max_bytes=max_bytes)
        self.taken: list[Event] = []
        self.reader = None
        self.may_take = asyncio.Event()
        self.may_take.set()
        self._reading = None

    @property
    def names(self):
        """Names of the requests that it read."""
        return [event.request for event in self.taken if event.kind is Kind.FINISHED]

    def read(self, after=OLDEST):
        """Start reading."""
        self.reader = self.new_reader(after)
        self._reading = asyncio.create_task(self.reader.run(self._take))

    def new_reader(self, after=OLDEST):
        """Return a reader that does not run."""
        return Reader(self._stream, self.log.counters, self._logger, after=after)

    async def publish(self, *events):
        """Publish events, and wait until Redis has them."""
        for event in events:
            self.log.publish(event)
        await self.log.flush()

    async def has(self, number):
        """Wait until it has read `number` events; fail if it has read more."""
        await eventually(lambda: len(self.taken) >= number and self.reader.lag_s == 0)
        assert len(self.taken) == number

    async def stop_reading(self):
        """Stop reading, and wait until the task has ended."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            assert self._reading.cancelled(), self._reading.exception()
            self._reading = None

    async def close(self):
        """Stop reading and writing."""
        await self.stop_reading()
        await self.log.close()

    async def _take(self, entry):
        if entry.writer != self._name:
            self.taken += entry.events
            await self.may_take.wait()


@asynccontextmanager
async def replicas(url, number, *, namespace="namespace", prefix="default", max_bytes=1 << 30):
    """Yield `number` replicas that share a log."""
    clients = [connect(url) for _ in range(number)]
    members = [Replica(RedisStream(client, prefix, namespace), max_bytes) for client in clients]
    try:
        yield members
    finally:
        for member, client in zip(members, clients, strict=True):
            await member.close()
            await client.aclose()
