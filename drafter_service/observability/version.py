"""Version of this distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the version of the installed distribution; "unknown" in a source tree that is not installed."""
    try:
        return version("ssd-drafter")
    except PackageNotFoundError:
        return "unknown"
