"""The processors that this process may use."""

from __future__ import annotations

import os


def usable_processors() -> frozenset[int]:
    """Return the numbers of the processors that this process may run on; of all where the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
