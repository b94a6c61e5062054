"""OpenMP settings of the `ssd-engine` command, made before PyTorch loads its OpenMP runtime."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "1000"
"""Iterations that a waiting OpenMP thread spins before it sleeps.

GNU OpenMP, which PyTorch's builds for Linux contain, spins 300,000 times by default, which takes milliseconds. Where
other processes take part of the processors, a thread then spins for as long as the thread that it waits for is not
scheduled, and takes the processor from it. `benchmarks/contention.py` compares values.
"""

CHOSEN_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting OpenMP threads sleep early, unless the environment already chooses how they wait.

    It takes effect only before PyTorch is first imported.
    """
    if not any(name in environment for name in CHOSEN_BY_USER):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
