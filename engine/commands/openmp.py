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


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting threads sleep at once if other processes need the processors.

    Values of GOMP_SPINCOUNT and OMP_WAIT_POLICY in `environment` take precedence.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys() or not STAT.exists():
        return
    processors = len(usable_processors())
    wanted = environment.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdecimal() else processors
    if is_contended(busy_processors(), processors, threads):
        environment["GOMP_SPINCOUNT"] = NO_SPINNING


def is_contended(busy: float, processors: int, threads: int) -> bool:
    """Return whether `threads` more busy threads exceed the capacity of `processors`, of which `busy` are in use."""
    return threads > 1 and busy + threads > processors + TOLERATED


def busy_processors(read: Callable[[], str] = STAT.read_text, wait: Callable[[float], None] = time.sleep) -> float:
    """Return how many of the usable processors are in use, measured over `WINDOW_S`. `read` returns /proc/stat."""
    processors = usable_processors()
    before = _times(read(), processors)
    wait(WINDOW_S)
    idle, total = (after - start for after, start in zip(_times(read(), processors), before, strict=True))
    return len(processors) * (1 - idle / total) if total else 0.0


def _times(stat: str, processors: Collection[int]) -> tuple[int, int]:
    """Return the ticks that some processors spent idle, and all their ticks."""
    names = {f"cpu{number}" for number in processors}
    rows = [list(map(int, row.split()[1:9])) for row in stat.splitlines() if row.partition(" ")[0] in names]
    return sum(row[3] + row[4] for row in rows), sum(map(sum, rows))
