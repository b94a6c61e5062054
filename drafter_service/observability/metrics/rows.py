"""From many namespaces to a bounded number of rows of numbers: some have their own, the rest are summed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from drafter_service.observability.facts import NamespaceFacts
from drafter_service.observability.metrics.catalogue import COUNTERS, GAUGES

OTHER = "other"
"""What the rest is called. A namespace of this name is always part of it."""
ENGINE = "ssd"
MOST_REMEMBERED = 1024
"""Namespaces whose last numbers are kept after they left memory: 2 kB each."""


@dataclass(frozen=True)
class Row:
    """The numbers of one namespace, or of the rest."""

    labels: dict[str, str]
    """Values of all labels that a metric may have."""
    counters: np.ndarray
    """float64 [sum of the widths of COUNTERS]."""
    gauges: np.ndarray
    """float64 [len(GAUGES)]."""


class Rows:
    """The rows, from one reading to the next.

    A namespace keeps its own row for as long as it is in memory. What is summed never falls, although namespaces come
    and go, and their counters go on or begin anew when they come back: a counter that falls would look like a restart.
    """

    def __init__(self, most_apart: int) -> None:
        self._most_apart = most_apart
        self._apart: set[str] = set()
        self._last: dict[str, np.ndarray] = {}
        """Counters at the last reading; those of namespaces that were there most recently come last."""
        self._rest: np.ndarray | None = None
        """Sums over namespaces without a row of their own; None before there ever was one."""

    def update(self, namespaces: Iterable[NamespaceFacts]) -> list[Row]:
        """The rows of these namespaces now, at most `most_apart` and one."""
        present = {facts.name: facts for facts in namespaces}
        self._choose(present)
        rows, rest_gauges = [], np.zeros(len(GAUGES))
        for name, facts in present.items():
            counters, gauges = _counters_of(facts), np.array([gauge.read(facts) for gauge in GAUGES], np.float64)
            last = self._last.pop(name, np.zeros_like(counters))
            self._last[name] = counters
            if name in self._apart:
                rows.append(Row(_labels(name, facts.model.name), counters, gauges))
            else:
                grown = np.where(counters >= last, counters - last, counters)
                self._rest = grown if self._rest is None else self._rest + grown
                rest_gauges += gauges
        for name in list(self._last)[: -max(len(present), MOST_REMEMBERED)]:
            del self._last[name]
        if self._rest is not None:
            rows.append(Row(_labels(OTHER, OTHER), self._rest, rest_gauges))
        return rows

    def _choose(self, present: dict[str, NamespaceFacts]) -> None:
        """Give the rows that are free to the namespaces that were used most."""
        self._apart &= present.keys()
        waiting = [facts for name, facts in present.items() if name not in self._apart and name != OTHER]
        waiting.sort(key=lambda facts: (-facts.stats.committed, facts.name))
        self._apart.update(facts.name for facts in waiting[: self._most_apart - len(self._apart)])


def _counters_of(facts: NamespaceFacts) -> np.ndarray:
    return np.concatenate([np.atleast_1d(counter.read(facts)) for counter in COUNTERS]).astype(np.float64)


def _labels(namespace: str, model: str) -> dict[str, str]:
    return {"engine": ENGINE, "model_name": model, "namespace": namespace}
