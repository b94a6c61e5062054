"""Errors that the user can fix, how command lines report them, and failures of drafters, which cost drafts alone."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REPORT_INTERVAL_S = 60.0
"""Minimum time between two reports of failures."""
MAX_FAILURES = 100
"""Number of failures in a row after which a drafter is switched off; a temporary cause is usually gone by then."""


class UserError(Exception):
    """An unusable input; the message names it and says what to do."""


def missing_extra(feature: str, extra: str) -> UserError:
    """Return the error for packages that are not installed.

    feature: the feature and the packages that it needs, such as "the shared log needs redis-py". extra: the extra of
    this distribution that contains them.
    """
    return UserError(f"{feature}; run in the source folder of ssd-drafter: pip install '.[{extra}]'")


@contextmanager
def exit_with_message() -> Iterator[None]:
    """Print a UserError or an interruption (Ctrl-C) as one line on stderr; exit with status 2 or 130 (128 + SIGINT)."""
    try:
        yield
    except UserError as problem:
        message, status = f"error: {problem}", 2
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    else:
        return
    print(message, file=sys.stderr)
    sys.exit(status)


class Failures:
    """Counts failures. One thread at a time may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self.count = 0
        """Number of all failures."""
        self._clock = clock
        self._in_a_row = 0
        self._unreported = 0
        self._reported_at = -math.inf

    @property
    def is_off(self) -> bool:
        """Whether the drafter is switched off for good."""
        return self._in_a_row >= MAX_FAILURES

    def add(self, count: int = 1) -> str | None:
        """Count failures; return the end of the message that reports them, None if they are not to be reported now."""
        self.count += count
        self._unreported += count
        self._in_a_row += 1
        if self._in_a_row == MAX_FAILURES:
            end = f"{MAX_FAILURES} failures in a row: drafting is switched off until this process is restarted"
        elif self._in_a_row < MAX_FAILURES and self._clock() >= self._reported_at + REPORT_INTERVAL_S:
            end = "continuing without its drafts"
        else:
            return None
        if self._unreported > count:
            end += f" ({self._unreported} failures since the last message)"
        self._unreported, self._reported_at = 0, self._clock()
        return end

    def succeeded(self) -> None:
        """Record that the drafter works, unless it is switched off."""
        if not self.is_off:
            self._in_a_row = 0
