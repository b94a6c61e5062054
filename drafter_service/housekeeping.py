"""What is done at intervals: samples for reports, snapshots, letting idle namespaces go."""

from __future__ import annotations

import asyncio
import time

import structlog

from drafter_service.namespaces import Namespaces
from drafter_service.settings.tree import ServiceConfig
from ssd.sections import SnapshotError

logger = structlog.get_logger(__name__)


class Housekeeping:
    """The service's clockwork; it goes by monotonic time, so that a jump of the clock stops nothing."""

    def __init__(self, namespaces: Namespaces, config: ServiceConfig) -> None:
        self._namespaces = namespaces
        self._sample_s = config.reports.sample_s
        self._save_s = config.snapshots.interval_s
        self._idle_s = config.namespaces.idle_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [asyncio.create_task(self._sample()), asyncio.create_task(self._keep())]

    async def stop(self) -> None:
        """End, after what is being saved."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sample(self) -> None:
        while True:
            for namespace in self._namespaces.loaded.values():
                namespace.note_sample(time.time())
            await asyncio.sleep(self._sample_s)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._save_s)
            await self._namespaces.save_changed()
            try:
                await self._namespaces.let_idle_go(self._idle_s)
            except SnapshotError as problem:
                logger.error("idle namespace not let go", reason=str(problem))
