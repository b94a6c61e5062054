"""Namespaces that could not be loaded, and when each is tried again, so that a broken disk is not read all the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from drafter_service.transport.absence import NOT_READY

logger = structlog.get_logger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 10.0
"""Delay before a namespace is tried again, in seconds: after the first failure, and at most. It doubles each time."""
MAX_FAILURES = 1024
"""Number of namespaces whose failures are remembered."""


class LoadError(RuntimeError):
    """Stored namespaces cannot be read now; their files are as they were, and a later call may succeed."""

    def __init__(self, what: str, problem: object) -> None:
        super().__init__(f"{NOT_READY}{what} cannot be loaded now: {problem}")


class Failure(NamedTuple):
    """The last failure to load a namespace."""

    reason: str
    retry_at: float
    """Time of the clock before which the namespace is not tried again."""
    interval_s: float


class Retries:
    """The failures by namespace."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failed = 0
        """Number of failures so far."""
        self._clock = clock
        self._failures: dict[str, Failure] = {}

    def check(self, name: str) -> None:
        """Raise LoadError, with the reason of the last failure, if it is too early to try again."""
        failure = self._failures.get(name)
        if failure is not None and (left_s := failure.retry_at - self._clock()) > 0:
            raise LoadError(f"namespace {name!r}", f"{failure.reason}; it is tried again in {left_s:.1f} s")

    def add(self, name: str, problem: BaseException) -> LoadError:
        """Record a failure; return the error for the callers."""
        reason = str(problem) or type(problem).__name__
        last = self._failures.pop(name, None)
        interval_s = min(LONGEST_RETRY_S, 2 * last.interval_s) if last else FIRST_RETRY_S
        self._failures[name] = Failure(reason, self._clock() + interval_s, interval_s)
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        self.failed += 1
        logger.error("namespace not loaded", namespace=name, reason=reason, tried_again_in_s=interval_s)
        return LoadError(f"namespace {name!r}", reason)

    def forget(self, name: str) -> None:
        """Remove the failures of a namespace that was loaded or dropped."""
        self._failures.pop(name, None)
