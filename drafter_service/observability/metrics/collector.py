"""Convert facts to the metric families that Prometheus reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from drafter_service.observability.facts import NamespaceFacts, ServiceFacts
from drafter_service.observability.metrics.catalogue import (
    BUCKETS,
    COUNTERS,
    GAUGES,
    INFO,
    INFO_HELP,
    LOG_METRICS,
    SERVICE_METRICS,
    Counter,
    Histogram,
)
from drafter_service.observability.metrics.engines import EngineRows

COUNTER_ENDS = tuple(accumulate(len(counter.values) for counter in COUNTERS))

PAUSE_S = 1e-4
"""Pause around each metric family, in seconds. Without it another thread waits up to 5 ms for the interpreter lock,
longer than an engine step: while 20 namespaces were collected continuously, the event loop was late by 3 ms (99th
percentile) with pauses and by 9 ms without."""

OTHER = "other"
"""Label of the row that sums the remaining namespaces. A namespace of this name is always part of it."""
LABEL = "namespace"
MAX_UNLOADED = 1024
"""Number of namespaces whose last counters are kept after they were unloaded, 2 kB each."""


class DrafterCollector(Collector):
    """Reads the facts whenever Prometheus scrapes."""

    def __init__(self, facts: Callable[[], ServiceFacts], max_namespaces: int) -> None:
        """Make a collector; it calls `facts` in the thread that collects."""
        self._facts = facts
        self._rows = NamespaceRows(max_namespaces)
        self._engines = EngineRows()
        self._updating = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield all families, with a pause around each in which the thread that answers engines can run."""
        for family in self._families():
            time.sleep(PAUSE_S)
            yield family
            time.sleep(PAUSE_S)

    def _families(self) -> Iterator[Metric]:
        facts = self._facts()
        with self._updating:
            rows = self._rows.update(facts.namespaces)
            engines = self._engines.update(facts.namespaces, facts.now)
        yield from _service_families(facts)
        for counter, end in zip(COUNTERS, COUNTER_ENDS, strict=True):
            columns = slice(end - len(counter.values), end)
            if isinstance(counter, Histogram):
                yield _histogram_family(counter, columns, rows)
            else:
                yield _counter_family(counter, columns, rows)
        for column, gauge in enumerate(GAUGES):
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=(LABEL,))
            for row in rows:
                family.add_metric([row.namespace], row.gauges[column])
            yield family
        yield from engines


# --- Rows: one for each of a limited number of namespaces, and one for the rest


@dataclass(frozen=True)
class Row:
    """Numbers of one namespace, or sums over the rest."""

    namespace: str
    """Value of the label."""
    counters: np.ndarray
    """float64 [sum of the widths of COUNTERS]."""
    gauges: np.ndarray
    """float64 [len(GAUGES)]."""


class NamespaceRows:
    """The rows, from one scrape to the next.

    A namespace keeps its own row while it is in memory. Sums never decrease when namespaces are unloaded, or when
    their counters restart at 0: Prometheus interprets a decreasing counter as a restart.
    """

    def __init__(self, max_own: int) -> None:
        """Make an empty table; max_own: maximum number of namespaces with a separate row."""
        self._max_own = max_own
        self._own: set[str] = set()
        self._last: dict[str, np.ndarray] = {}
        """Counters at the last scrape, most recently present namespaces last."""
        self._rest: np.ndarray | None = None
        """Sums over namespaces without a separate row; None if there never was one."""

    def update(self, namespaces: Iterable[NamespaceFacts]) -> list[Row]:
        """Return the current rows of these namespaces: at most `max_own`, and one for the rest."""
        present = {facts.name: facts for facts in namespaces}
        self._assign(present)
        rows, rest_gauges = [], np.zeros(len(GAUGES))
        for name, facts in present.items():
            counters, gauges = _counters_of(facts), np.array([gauge.read(facts) for gauge in GAUGES], np.float64)
            last = self._last.pop(name, np.zeros_like(counters))
            self._last[name] = counters
            if name in self._own:
                rows.append(Row(name, counters, gauges))
            else:
                growth = np.where(counters >= last, counters - last, counters)
                self._rest = growth if self._rest is None else self._rest + growth
                rest_gauges += gauges
        for name in list(self._last)[: -max(len(present), MAX_UNLOADED)]:
            del self._last[name]
        if self._rest is not None:
            rows.append(Row(OTHER, self._rest, rest_gauges))
        return rows

    def _assign(self, present: dict[str, NamespaceFacts]) -> None:
        """Assign free rows to the namespaces with the most committed tokens."""
        self._own &= present.keys()
        waiting = [facts for name, facts in present.items() if name not in self._own and name != OTHER]
        waiting.sort(key=lambda facts: (-facts.stats.committed, facts.name))
        self._own.update(facts.name for facts in waiting[: self._max_own - len(self._own)])


def _counters_of(facts: NamespaceFacts) -> np.ndarray:
    return np.concatenate([np.atleast_1d(counter.read(facts)) for counter in COUNTERS]).astype(np.float64)


# --- Families


def _counter_family(counter: Counter, columns: slice, rows: list[Row]) -> Metric:
    labels = (LABEL, counter.label) if counter.label else (LABEL,)
    family = CounterMetricFamily(counter.name, counter.help, labels=labels)
    for row in rows:
        for value, number in zip(counter.values, row.counters[columns].tolist(), strict=True):
            family.add_metric([row.namespace, value][: len(labels)], number)
    return family


def _histogram_family(histogram: Histogram, columns: slice, rows: list[Row]) -> Metric:
    family = HistogramMetricFamily(histogram.name, histogram.help, labels=(LABEL,))
    for row in rows:
        *counts, total_s = row.counters[columns].tolist()
        buckets = list(zip(BUCKETS, accumulate(counts), strict=True))
        family.add_metric([row.namespace], buckets, total_s)
    return family


def _service_families(facts: ServiceFacts) -> Iterator[Metric]:
    yield InfoMetricFamily(INFO, INFO_HELP, {"version": facts.version})
    numbers = [(metric.name, metric.help, metric.read(facts)) for metric in SERVICE_METRICS]
    if facts.log is not None:
        numbers += [(metric.name, metric.help, metric.read(facts.log)) for metric in LOG_METRICS]
    for name, text, number in numbers:
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        yield family(name, text, number)
