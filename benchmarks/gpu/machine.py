"""What results are of: the date, the device, versions, the commit."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.memory import device_name

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy", "numba")


def describe(device: str, commit: str | None) -> dict[str, object]:
    """The head of a document."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "gpu": device_name(device),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **versions()},
        "commit": commit or commit_of_git(),
    }


def today() -> str:
    """The date, as files are named."""
    return datetime.now(UTC).date().isoformat()


def versions() -> dict[str, str | None]:
    """Of packages that decide how fast it is; None for those that are not there."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit_of_git() -> str:
    """The commit of the source tree, marked if files have changed since; "unknown" where it was copied without git."""
    try:
        asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() or "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
