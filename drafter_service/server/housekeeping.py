"""What is done at intervals: samples for reports, snapshots, letting idle namespaces go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from drafter_service.server.namespaces import Namespaces
from drafter_service.settings.tree import ServiceConfig

logger = structlog.get_logger(__name__)


class Housekeeping:
    """The service's clockwork; it goes by monotonic time, so that a jump of the clock stops nothing."""

    def __init__(self, namespaces: Namespaces, config: ServiceConfig) -> None:
        self._namespaces = namespaces
        self._sample_s = config.reports.sample_s
        self._save_s = config.snapshots.interval_s
        self._idle_s = config.namespaces.idle_s
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [
            asyncio.create_task(self._repeat(self._sample_s, self._sample)),
            asyncio.create_task(self._repeat(self._save_s, self._keep)),
        ]

    async def stop(self) -> None:
        """End, after what is being done."""
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
                    logger.exception("housekeeping failed; it goes on")

    async def _sample(self) -> None:
        for namespace in self._namespaces.loaded.values():
            namespace.note_sample(time.time())

    async def _keep(self) -> None:
        await self._namespaces.save_changed()
        await self._namespaces.let_idle_go(self._idle_s)
