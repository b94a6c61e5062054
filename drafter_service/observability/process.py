"""Memory and limits of this process, and the version of this distribution."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the resident memory of the process; its maximum so far without /proc, or without a free descriptor."""
    with suppress(OSError):
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def allow_files(number: int) -> bool:
    """Raise the limit on open files to `number` if the system permits; return whether it does.

    The limit of a shell is often 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return True
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    return wanted >= number


def own_version() -> str:
    """Return the version of the installed distribution; "unknown" in a source tree that is not installed."""
    try:
        return version("ssd-drafter")
    except PackageNotFoundError:
        return "unknown"
