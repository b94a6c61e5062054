"""What kinds of metrics a namespace has, and how their numbers are read.

Whatever counts is a row of numbers, so that the rows of many namespaces can be summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from drafter_service.observability.facts import BOUNDS_S, Latency, NamespaceFacts

LABELS = ("namespace",)
VLLM_LABELS = ("engine", "model_name", "namespace")
"""Dashboards for vLLM expect the first two."""

BUCKETS = (*(f"{bound:.6g}" for bound in BOUNDS_S[::2]), "+Inf")
"""Upper bounds in seconds: every other one of the bins."""
_BUCKET_STARTS = (0, *range(1, len(BOUNDS_S) + 1, 2))

Numbers = np.ndarray | float
Read = Callable[[NamespaceFacts], Numbers]


@dataclass(frozen=True)
class Counter:
    """A number that only grows, or one for each value of a label."""

    name: str
    help: str
    read: Read
    """As many numbers as there are label values."""
    label: str = ""
    values: tuple[str, ...] = ("",)
    """Of the label."""
    is_cut: bool = False
    """Label values behind the last that was ever used are left out."""
    labels: tuple[str, ...] = LABELS


@dataclass(frozen=True)
class Histogram:
    """How long something took: its row is the count of each bucket, not cumulative, then the sum in seconds."""

    name: str
    help: str
    latency: Callable[[NamespaceFacts], Latency]
    values: tuple[str, ...] = (*BUCKETS, "sum")
    labels: tuple[str, ...] = LABELS

    def read(self, facts: NamespaceFacts) -> np.ndarray:
        """float64 [buckets + 1]."""
        latency = self.latency(facts)
        return np.append(np.add.reduceat(np.array(latency.counts, np.float64), _BUCKET_STARTS), latency.total_s)


@dataclass(frozen=True)
class Gauge:
    """A number that comes and goes. Those of several namespaces can be summed."""

    name: str
    help: str
    read: Callable[[NamespaceFacts], float]
    labels: tuple[str, ...] = LABELS
