"""What the results of commands were made with."""

from __future__ import annotations

import platform

import torch

from drafter_service.observability.measuring.results import versions

PACKAGES = ("ssd-drafter", "torch", "numpy", "numba", "grpcio")


def made_with() -> dict[str, str]:
    """Return the versions of packages, and the platform, by name."""
    return {**versions(PACKAGES), "platform": f"{platform.machine()}, {torch.get_num_threads()} threads"}
