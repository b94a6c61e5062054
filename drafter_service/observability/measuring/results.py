"""Files of results, and what they were made with."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ssd.corpus.processors import usable_processors
from ssd.errors import UserError

OWNER_ONLY = 0o600
"""Permissions of pages: names of namespaces and models in them may be those of customers."""
CPU_INFO = Path("/proc/cpuinfo")


def prepare(out: Path, names: Iterable[str]) -> None:
    """Make a folder and check that files can be written into it, before running for minutes. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise _failure(out, problem) from None
    for name in names:
        check_writable(out / name)


def check_writable(path: Path) -> None:
    """Raise UserError if a file cannot be written. Its contents do not change."""
    try:
        # A symbolic link is kept, and the file that it names is removed.
        new = None if path.exists() else path.resolve()
        path.open("a").close()
        if new is not None:
            new.unlink()
    except OSError as problem:
        raise _failure(path, problem) from None


def write(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file; mode: permissions of a new one, before the umask. Raises UserError."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as problem:
        raise _failure(path, problem) from None


def _failure(path: Path, problem: OSError) -> UserError:
    return UserError(f"cannot write to {path}: {problem.strerror}; give another place")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, object]:
    """Return the date, the name of the processor, and the number of cores that this process may use."""
    return {"date": datetime.now(UTC).date().isoformat(), "cpu": cpu_name(), "cores": len(usable_processors())}


def cpu_name() -> str:
    """Return the name of this machine's processor."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
