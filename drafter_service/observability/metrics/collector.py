"""Convert facts to the metric families that Prometheus reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
    ENGINE_METRICS,
    GAUGES,
    INFO,
    INFO_HELP,
    LOG_METRICS,
    SERVICE_METRICS,
    Counter,
    Histogram,
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
        yield from _service_families(facts)
        for counter in COUNTERS:
            if isinstance(counter, Histogram):
                yield _histogram_family(counter, facts.namespaces)
            else:
                yield _counter_family(counter, facts.namespaces)
        for gauge in GAUGES:
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=(LABEL,))
            for namespace in facts.namespaces:
                family.add_metric([namespace.name], gauge.read(namespace))
            yield family
        yield from _engine_families(facts.namespaces)


# --- Families


def _counter_family(counter: Counter, namespaces: Sequence[NamespaceFacts]) -> Metric:
    labels = (LABEL, counter.label) if counter.label else (LABEL,)
    family = CounterMetricFamily(counter.name, counter.help, labels=labels)
    for facts in namespaces:
        for value, number in zip(counter.values, np.atleast_1d(counter.read(facts)).tolist(), strict=True):
            family.add_metric([facts.name, value][: len(labels)], number)
    return family


def _histogram_family(histogram: Histogram, namespaces: Sequence[NamespaceFacts]) -> Metric:
    family = HistogramMetricFamily(histogram.name, histogram.help, labels=(LABEL,))
    for facts in namespaces:
        *counts, total_s = histogram.read(facts).tolist()
        buckets = list(zip(BUCKETS, accumulate(counts), strict=True))
        family.add_metric([facts.name], buckets, total_s)
    return family


def _engine_families(namespaces: Sequence[NamespaceFacts]) -> Iterator[Metric]:
    oldest = time.monotonic() - KEPT_S
    uses = [
        ([facts.name, engine.host, engine.client, engine.name], use)
        for facts in namespaces
        for engine, use in facts.uses.items()
        if use.streams or use.disconnected_at > oldest
    ]
    for metric in ENGINE_METRICS:
        family = _family_of(metric.name)(metric.name, metric.help, labels=ENGINE_LABELS)
        for labels, use in uses:
            family.add_metric(labels, metric.read(use))
        yield family


def _family_of(name: str) -> type[CounterMetricFamily | GaugeMetricFamily]:
    return CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily


def _service_families(facts: ServiceFacts) -> Iterator[Metric]:
    yield InfoMetricFamily(INFO, INFO_HELP, {"version": facts.version})
    numbers = [(metric.name, metric.help, metric.read(facts)) for metric in SERVICE_METRICS]
    if facts.log is not None:
        numbers += [(metric.name, metric.help, metric.read(facts.log)) for metric in LOG_METRICS]
    for name, text, number in numbers:
        yield _family_of(name)(name, text, number)
