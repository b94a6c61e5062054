"""Choose how long waiting OpenMP threads spin, before PyTorch is first imported.

GNU OpenMP, which PyTorch's Linux builds contain, lets a waiting thread spin for milliseconds before it sleeps. On idle
processors this is fastest. If other processes compete for the processors, a spinning thread keeps the thread that it
waits for from being scheduled. docs/experiments.md has the figures (2026-11-22).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, MutableMapping
from pathlib import Path

from ssd.corpus.processors import usable_processors

NO_SPINNING = "0"
WINDOW_S = 0.1
"""Time over which the load of the processors is measured: ten ticks of Linux's clock."""
TOLERATED = 0.5
"""Processors' worth of missing capacity at which threads still spin: background load is not contention."""
STAT = Path("/proc/stat")


def limit_spinning(environment: MutableMapping[str, str], read: Callable[[], str] = STAT.read_text) -> None:
    """Let waiting threads sleep at once if other processes need the processors: if OpenMP's threads exceed those that
    are free.

    Values of GOMP_SPINCOUNT and OMP_WAIT_POLICY in `environment` take precedence. `read` returns /proc/stat.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys() or not STAT.exists():
        return
    processors = usable_processors()
    wanted = environment.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdecimal() else len(processors)
    before = _times(read(), processors)
    time.sleep(WINDOW_S)
    idle, total = (after - start for after, start in zip(_times(read(), processors), before, strict=True))
    busy = len(processors) * (1 - idle / total) if total else 0.0
    if threads > 1 and busy + threads > len(processors) + TOLERATED:
        environment["GOMP_SPINCOUNT"] = NO_SPINNING


def _times(stat: str, processors: Collection[int]) -> tuple[int, int]:
    """Return the ticks that some processors spent idle, and all their ticks."""
    names = {f"cpu{number}" for number in processors}
    rows = [list(map(int, row.split()[1:9])) for row in stat.splitlines() if row.partition(" ")[0] in names]
    return sum(row[3] + row[4] for row in rows), sum(map(sum, rows))
