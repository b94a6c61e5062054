"""From facts to the families of samples that Prometheus reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
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

from drafter_service.observability.facts import ServiceFacts
from drafter_service.observability.metrics.catalogue import COUNTERS, GAUGES
from drafter_service.observability.metrics.kinds import BUCKETS, Counter, Histogram
from drafter_service.observability.metrics.rows import Row, Rows
from drafter_service.observability.metrics.service import INFO, INFO_HELP, LOG_METRICS, SERVICE_METRICS

COUNTER_ENDS = tuple(accumulate(len(counter.values) for counter in COUNTERS))

PAUSE_S = 1e-4
"""Without pauses a thread that wants the interpreter waits until it is taken away by force, 5 ms: longer than a step.
With them an event loop was late by 3 ms in 1 of 100 times while 20 namespaces were read without end, not by 9."""


class DrafterCollector(Collector):
    """Reads the facts whenever Prometheus asks."""

    def __init__(self, facts: Callable[[], ServiceFacts], most_namespaces: int) -> None:
        """`facts` is called in the thread of whoever collects."""
        self._facts = facts
        self._rows = Rows(most_namespaces)
        self._updating = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """All families, with a pause around each, in which the thread that answers engines goes on."""
        for family in self._families():
            time.sleep(PAUSE_S)
            yield family
            time.sleep(PAUSE_S)

    def _families(self) -> Iterator[Metric]:
        facts = self._facts()
        with self._updating:
            rows = self._rows.update(facts.namespaces)
        yield from _service_families(facts)
        for counter, end in zip(COUNTERS, COUNTER_ENDS, strict=True):
            columns = slice(end - len(counter.values), end)
            if isinstance(counter, Histogram):
                yield _histogram_family(counter, columns, rows)
            else:
                yield _counter_family(counter, columns, rows)
        for column, gauge in enumerate(GAUGES):
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
            for row in rows:
                family.add_metric(_values(row, gauge.labels), row.gauges[column])
            yield family


def _counter_family(counter: Counter, columns: slice, rows: list[Row]) -> Metric:
    labels = (*counter.labels, counter.label) if counter.label else counter.labels
    family = CounterMetricFamily(counter.name, counter.help, labels=labels)
    for row in rows:
        numbers = row.counters[columns].tolist()
        used = 1 + int(np.max(np.flatnonzero(numbers), initial=0)) if counter.is_cut else len(numbers)
        own = _values(row, counter.labels)
        for value, number in zip(counter.values[:used], numbers, strict=False):
            family.add_metric([*own, value] if counter.label else own, number)
    return family


def _histogram_family(histogram: Histogram, columns: slice, rows: list[Row]) -> Metric:
    family = HistogramMetricFamily(histogram.name, histogram.help, labels=histogram.labels)
    for row in rows:
        *counts, total_s = row.counters[columns].tolist()
        buckets = list(zip(BUCKETS, accumulate(counts), strict=True))
        family.add_metric(_values(row, histogram.labels), buckets, total_s)
    return family


def _service_families(facts: ServiceFacts) -> Iterator[Metric]:
    yield InfoMetricFamily(INFO, INFO_HELP, {"version": facts.version})
    numbers = [(metric.name, metric.help, metric.read(facts)) for metric in SERVICE_METRICS]
    if facts.log is not None:
        numbers += [(metric.name, metric.help, metric.read(facts.log)) for metric in LOG_METRICS]
    for name, text, number in numbers:
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        yield family(name, text, number)


def _values(row: Row, labels: tuple[str, ...]) -> list[str]:
    return [row.labels[label] for label in labels]
