"""Metrics by engine, over all namespaces: whether it is connected, its late steps, and its tokens per step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from drafter_service.observability.facts import MAX_ENGINES, OTHER_ENGINES, Engine, EngineUse, NamespaceFacts

KEPT_S = 3600.0
"""Seconds for which an engine is exported after its last stream has ended, so that alerts see it. Later it was
probably stopped."""
LABELS = ("host", "engine")

CONNECTED = "ssd_drafter_engine_connected", "1 while the engine is connected, 0 for an hour after it was."
COUNTERS = (
    (
        "ssd_drafter_engine_steps_total",
        "Engine steps with a request for drafts, or with none because earlier answers were late.",
    ),
    (
        "ssd_drafter_engine_late_steps_total",
        "Engine steps among them without drafts because the answer was late.",
    ),
    ("ssd_drafter_engine_sequence_steps_total", "Sequence steps, with or without a draft."),
    (
        "ssd_drafter_engine_committed_tokens_total",
        "Tokens that the target produced: accepted draft tokens and bonus tokens.",
    ),
)

Labels = tuple[str, str]
"""Name of an engine's software, and its own name."""


@dataclass
class Row:
    """Numbers of one engine."""

    counters: np.ndarray
    """float64 [len(COUNTERS)]."""
    streams: int
    """Connected now."""
    seen_at: float
    """Time of the last scrape at which it was connected, or had been since the scrape before; seconds since 1970."""

    def add(self, other: Row) -> None:
        """Add other numbers."""
        self.counters = self.counters + other.counters
        self.streams += other.streams
        self.seen_at = max(self.seen_at, other.seen_at)


class EngineRows:
    """Metrics of engines, kept from one scrape to the next. Counters do not decrease when a namespace is unloaded.

    Beyond `MAX_ENGINES` a new engine replaces the one that has been disconnected for longest; if all are connected, it
    is counted in the row of `OTHER_ENGINES`.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, Engine], np.ndarray] = {}
        """Counters at the last scrape by namespace and engine, of namespaces that were in memory."""
        self._rows: dict[Labels, Row] = {}

    def update(self, namespaces: Iterable[NamespaceFacts], now: float) -> list[Metric]:
        """Add what was counted since the last scrape; return the families. now: seconds since 1970."""
        grown = self._grown(namespaces, now)
        for row in self._rows.values():
            row.streams = 0
        for labels in grown.keys() & self._rows.keys():
            self._rows[labels].add(grown.pop(labels))
        for labels in [labels for labels, row in self._rows.items() if now - row.seen_at > KEPT_S]:
            del self._rows[labels]
        for labels, row in grown.items():
            labels = self._place_for(labels)
            if labels in self._rows:
                self._rows[labels].add(row)
            else:
                self._rows[labels] = row
        return self._families()

    def _grown(self, namespaces: Iterable[NamespaceFacts], now: float) -> dict[Labels, Row]:
        """Return what was counted since the last scrape, of engines that are or were connected since then."""
        present: dict[tuple[str, Engine], np.ndarray] = {}
        grown: dict[Labels, Row] = {}
        for facts in namespaces:
            for engine, use in facts.uses.items():
                counters = _counters_of(use)
                last = self._last.get((facts.name, engine), np.zeros_like(counters))
                present[facts.name, engine] = counters
                # A namespace that was loaded again counts from 0.
                row = Row(np.where(counters >= last, counters - last, counters), use.streams, now)
                labels = engine.host, engine.name
                if labels in grown:
                    grown[labels].add(row)
                elif row.streams or row.counters.any():
                    grown[labels] = row
        self._last = present
        return grown

    def _place_for(self, labels: Labels) -> Labels:
        """Return the labels of the row for a new engine; drop another row if there are too many."""
        other = OTHER_ENGINES.host, OTHER_ENGINES.name
        own = self._rows.keys() - {other}
        if len(own) < MAX_ENGINES:
            return labels
        idle = [each for each in own if not self._rows[each].streams]
        if not idle:
            return other
        del self._rows[min(idle, key=lambda each: self._rows[each].seen_at)]
        return labels

    def _families(self) -> list[Metric]:
        gauge = GaugeMetricFamily(*CONNECTED, labels=LABELS)
        for labels, row in self._rows.items():
            gauge.add_metric(labels, int(row.streams > 0))
        families: list[Metric] = [gauge]
        for column, (name, text) in enumerate(COUNTERS):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for labels, row in self._rows.items():
                counter.add_metric(labels, row.counters[column])
            families.append(counter)
        return families


def _counters_of(use: EngineUse) -> np.ndarray:
    """Return the numbers of `COUNTERS`, float64."""
    return np.array([use.engine_steps, use.late_steps, use.stats.steps, use.stats.committed], np.float64)
