"""A replica that records the events it reads from the shared log."""

from __future__ import annotations

import asyncio
import functools
import time
from contextlib import asynccontextmanager

import numpy as np

from drafter_service.replication.events import Event, Finished
from drafter_service.replication.redis_stream import OLDEST
from drafter_service.replication.replicas import Replication
from drafter_service.settings.tree import LogConfig

TIMEOUT_S = 30.0


def in_loop(test):
    """Run a coroutine function as a test, with a timeout."""

    @functools.wraps(test)
    def run(*arguments, **named):
        async def bounded():
            async with asyncio.timeout(TIMEOUT_S):
                await test(*arguments, **named)

        asyncio.run(bounded())

    return run


def request(name, *tokens, time=1.0):
    """Return a finished request."""
    return Finished(name, np.array(tokens or (1, 2, 3), np.uint32), time)


async def eventually(condition):
    """Wait until a condition holds."""
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0)


class Replica:
    """Publishes events, and after `read` records the events of others."""

    def __init__(self, log):
        self.log = log
        self.taken: list[Event] = []
        self.reader = None
        self.may_take = asyncio.Event()
        self.may_take.set()
        self._reading = None

    @property
    def names(self):
        """Names of the requests that it read."""
        return [event.request for event in self.taken if isinstance(event, Finished)]

    def read(self, after=OLDEST, known=()):
        """Start reading."""
        self.reader = self.log.reader(after, known)
        self._reading = asyncio.create_task(self.reader.run(self._take))

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

    async def _take(self, events):
        self.taken += events
        await self.may_take.wait()


@asynccontextmanager
async def replicas(url, number, *, namespace="namespace", **options):
    """Yield `number` replicas that share a log; options: settings of `LogConfig`."""
    logs = [Replication(LogConfig(url=url, **options)) for _ in range(number)]
    members = [Replica(log.open(namespace)) for log in logs]
    try:
        yield members
    finally:
        for member, log in zip(members, logs, strict=True):
            await member.close()
            await log.stop()
