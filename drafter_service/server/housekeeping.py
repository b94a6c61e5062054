"""Periodic work: samples for reports, snapshots, and unloading of idle namespaces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from drafter_service.server.namespaces import Namespaces
from drafter_service.settings.tree import ServiceConfig

logger = structlog.get_logger(__name__)

SAMPLE_S = 10.0
"""Seconds between two samples of the counters for reports over time."""
IDLE_S = 3600.0
"""Seconds after which a namespace without streams is saved and unloaded, if it can be saved."""


class Housekeeping:
    """Runs the periodic work by monotonic time, so that it continues if the clock jumps."""

    def __init__(self, namespaces: Namespaces, config: ServiceConfig) -> None:
        self._namespaces = namespaces
        self._save_s = config.snapshots.interval_s
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the tasks."""
        self._tasks = [
            asyncio.create_task(self._repeat(SAMPLE_S, self._sample)),
            asyncio.create_task(self._repeat(self._save_s, self._save)),
        ]

    async def stop(self) -> None:
        """Stop the tasks, after work in progress."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _repeat(self, interval_s: float, act: Callable[[], Awaitable[None]]) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(interval_s):
                    await self._stopping.wait()
            except TimeoutError:
                try:
                    await act()
                except Exception:
                    logger.exception("housekeeping failed; it is tried again")

    async def _sample(self) -> None:
        for namespace in self._namespaces.loaded.values():
            namespace.record_sample(time.time())

    async def _save(self) -> None:
        await self._namespaces.save_changed()
        await self._namespaces.unload_idle(IDLE_S)
