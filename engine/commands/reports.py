"""Parts that the reports of several commands share."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch

from ssd.errors import UserError

PACKAGES = ("ssd-drafter", "torch", "numpy", "numba", "grpcio")
CPU_INFO = Path("/proc/cpuinfo")


def prepare_reports(out: Path, names: Iterable[str]) -> None:
    """Make a folder and check that files can be written into it, before running for minutes. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in (out / name for name in names):
            # A symbolic link is kept, and the file that it names is removed.
            new = None if path.exists() else path.resolve()
            path.open("a").close()
            if new is not None:
                new.unlink()
    except OSError as problem:
        raise UserError(f"cannot write to {out}: {problem.strerror}; give another folder with --out") from None


def cpu_name() -> str:
    """Return the name of this machine's processor."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_versions() -> dict[str, str]:
    """Return the versions of packages, and the platform, by name."""
    return {
        **{package: version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "platform": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
