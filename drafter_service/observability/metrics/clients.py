"""Numbers by the name of the client, such as "vllm/0.33.0 ssd-drafter/0.1.0", over all namespaces."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from drafter_service.observability.facts import NamespaceFacts

MAX_CLIENTS = 32
"""Maximum number of names with rows of their own: clients choose their names."""
OTHERS = "others"

COUNTERS = (
    ("ssd_drafter_steps_by_client_total", "Sequence steps, by name and version of the client."),
    (
        "ssd_drafter_committed_tokens_by_client_total",
        "Tokens that the targets produced, by name and version of the client.",
    ),
)
STREAMS = ("ssd_drafter_streams_by_client", "Engine streams connected now, by name and version of the client.")


class ClientSums:
    """Sums over namespaces, from one scrape to the next. They do not decrease when a namespace is unloaded."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], np.ndarray] = {}
        """Counters at the last scrape by namespace and client, of namespaces that were in memory."""
        self._sums: dict[str, np.ndarray] = {}
        """Steps and committed tokens by client, int64 [2]."""

    def update(self, namespaces: Iterable[NamespaceFacts]) -> list[Metric]:
        """Add what was counted since the last scrape; return the families."""
        present: dict[tuple[str, str], np.ndarray] = {}
        streams: dict[str, int] = {}
        for facts in namespaces:
            for client, use in list(facts.uses.items()):
                key, counters = (facts.name, client), np.array([use.steps, use.committed])
                last = self._last.get(key, np.zeros_like(counters))
                name = client if client in self._sums or len(self._sums) < MAX_CLIENTS else OTHERS
                # A namespace that was loaded again counts from 0.
                grown = np.where(counters >= last, counters - last, counters)
                self._sums[name] = self._sums.get(name, 0) + grown
                streams[name] = streams.get(name, 0) + use.streams
                present[key] = counters
        self._last = present
        families: list[Metric] = []
        for column, (metric, text) in enumerate(COUNTERS):
            counter = CounterMetricFamily(metric, text, labels=["client"])
            for name, sums in self._sums.items():
                counter.add_metric([name], int(sums[column]))
            families.append(counter)
        gauge = GaugeMetricFamily(*STREAMS, labels=["client"])
        for name in self._sums:
            gauge.add_metric([name], streams.get(name, 0))
        return [*families, gauge]
