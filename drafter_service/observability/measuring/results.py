"""Files of results, and what they were made with."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ssd.corpus.processors import usable_processors
from ssd.errors import UserError

CPU_INFO = Path("/proc/cpuinfo")


def prepare(out: Path, names: Iterable[str]) -> None:
    """Make a folder and check that files can be written into it, before running for minutes. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            try_writing(out / name)
    except OSError as problem:
        raise UserError(f"cannot write to {out}: {problem.strerror}; give another folder with --out") from None


def try_writing(path: Path) -> None:
    """Raise OSError if a file cannot be written. Its contents do not change."""
    # A symbolic link is kept, and the file that it names is removed.
    new = None if path.exists() else path.resolve()
    path.open("a").close()
    if new is not None:
        new.unlink()


def write(out: Path, contents: Mapping[str, str]) -> None:
    """Write files by their names. Raises UserError."""
    try:
        for name, content in contents.items():
            (out / name).write_text(content, encoding="utf-8")
    except OSError as problem:
        raise UserError(f"cannot write to {out}: {problem.strerror}; give another folder with --out") from None


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
