"""Trying again after errors: later each time, and said once when trouble begins and once when it has passed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from drafter_service.replication.counters import LogCounters
from drafter_service.replication.stream import LogUnavailable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
MOST_DOUBLINGS = 10


class Retry:
    """The attempts at one task."""

    def __init__(self, logger: Any, counters: LogCounters) -> None:
        """`logger`: of structlog, bound to what is tried."""
        self._logger, self._counters = logger, counters
        self._failures = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    async def pause(self, problem: LogUnavailable) -> None:
        """An attempt failed; returns when the next one may be made."""
        if self._failures == 0:
            self._logger.warning("shared_log_unavailable", error=str(problem))
        self._counters.errors += 1
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures, MOST_DOUBLINGS))
        self._failures += 1
        await asyncio.sleep(random.uniform(0.5, 1) * longest)

    def succeeded(self) -> None:
        """An attempt succeeded."""
        if self._failures:
            self._logger.info("shared_log_available", attempts=self._failures)
        self._failures = 0
