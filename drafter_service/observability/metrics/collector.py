"""Convert facts to the metric families that Prometheus reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from drafter_service.observability.facts import Latency, ServiceFacts
from drafter_service.observability.metrics import catalogue
from drafter_service.observability.metrics.catalogue import (
    BUCKETS,
    ENGINE_METRICS,
    INFO,
    INFO_HELP,
    LOG_METRICS,
    NAMESPACE_METRICS,
    SERVICE_METRICS,
)

PAUSE_S = 1e-4
"""Pause around each metric family, in seconds. Without it another thread waits up to 5 ms for the interpreter lock,
longer than an engine step: while 20 namespaces were collected continuously, the event loop was late by 3 ms (99th
percentile) with pauses and by 9 ms without."""

LABEL = "namespace"
ENGINE_LABELS = (LABEL, "host", "client", "engine")
KEPT_S = 3600.0
"""Seconds for which an engine is exported after its last stream has ended, so that alerts see it. Later it was
probably stopped."""


class DrafterCollector(Collector):
    """Reads the facts whenever Prometheus scrapes."""

    def __init__(self, facts: Callable[[], ServiceFacts]) -> None:
        """Make a collector; it calls `facts` in the thread that collects."""
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Yield all families, with a pause around each in which the thread that answers engines can run."""
        for family in self._families():
            time.sleep(PAUSE_S)
            yield family
            time.sleep(PAUSE_S)

    def _families(self) -> Iterator[Metric]:
        facts = self._facts()
        yield InfoMetricFamily(INFO, INFO_HELP, {"version": facts.version})
        yield from _families_of(SERVICE_METRICS, (), [((), facts)])
        if facts.log is not None:
            yield from _families_of(LOG_METRICS, (), [((), facts.log)])
        yield from _families_of(NAMESPACE_METRICS, (LABEL,), [((each.name,), each) for each in facts.namespaces])
        oldest = time.monotonic() - KEPT_S
        uses = [
            ((namespace.name, engine.host, engine.client, engine.name), use)
            for namespace in facts.namespaces
            for engine, use in namespace.uses.items()
            if use.streams or use.disconnected_at > oldest
        ]
        yield from _families_of(ENGINE_METRICS, ENGINE_LABELS, uses)


def _families_of(
    metrics: Iterable[catalogue.Metric], labels: Sequence[str], items: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    """Yield the family of each metric, read from items with the values of `labels`."""
    for metric in metrics:
        if metric.name.endswith("_latency_seconds"):
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
            for values, item in items:
                histogram.add_metric(values, *buckets(metric.read(item)))
            yield histogram
            continue
        kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=(*labels, metric.label) if metric.label else labels)
        for values, item in items:
            numbers = metric.read(item)
            for value, number in zip(metric.values, numbers, strict=True) if metric.label else [("", numbers)]:
                family.add_metric((*values, value)[: len(labels) + bool(metric.label)], number)
        yield family


def buckets(latency: Latency) -> tuple[list[tuple[str, float]], float]:
    """Return upper bounds with the numbers of durations up to them, and the sum of all durations, in seconds."""
    counts = latency.counts.copy()  # The original may change concurrently.
    cumulated = list(accumulate(counts))
    return list(zip(BUCKETS, [*cumulated[::2], cumulated[-1]], strict=True)), latency.total_s
