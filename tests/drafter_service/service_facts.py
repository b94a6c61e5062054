"""Made-up facts of services, with a value in every field."""

from __future__ import annotations

import numpy as np

from drafter_service.observability.facts import (
    History,
    Latency,
    ModelIdentity,
    NamespaceFacts,
    ServiceFacts,
    ShadowUse,
)
from drafter_service.observability.report.schema import ClientTotals, CorpusReport, SharedLogReport
from ssd.stats import Stats


def latency_of(*seconds):
    latency = Latency()
    for each in seconds:
        latency.record(each)
    return latency


def filled_stats(seed):
    """Return statistics with random counts; drafts have 6 positions."""
    stats, rng = Stats(), np.random.default_rng(seed)
    for array in stats.counters:
        array[:] = rng.integers(1, 1000, array.shape)
    stats.counters.by_position[6:] = 0
    return stats


def namespace_facts(name="main", stats=None, **changes):
    parts = {
        "model": ModelIdentity("llama"),
        "history": History(),
        "corpus": CorpusReport(
            capacity_tokens=1000,
            tokens=900,
            requests=80,
            learned_tokens=70_000,
            waiting_tokens=60,
            merges=50,
            base_merges=40,
            full_builds=30,
            forgotten_requests=20,
        ),
        "shadow": ShadowUse(filled_stats(7), observed=90, scored=70),
        "memory_bytes": 12_345,
        "streams": 3,
        "sequences": 17,
        "draft_latency": latency_of(3e-5, 4e-4, 4e-4, 20.0),
        "merge_latency": latency_of(0.011),
        "clients": ClientTotals(timeouts=1, dropped=2, resyncs=3, reconnects=4),
        "duplicates": 6,
    }
    return NamespaceFacts(name=name, stats=stats or Stats(), **(parts | changes))


def service_facts(*namespaces, **changes):
    parts = {
        "version": "1.2.3",
        "started_at": 1000.0,
        "now": 1060.0,
        "memory_bytes": 2_000_000,
        "refused": 9,
        "memory_limit": 5_000_000,
        "unevictable_bytes": 3_000_000,
        "log": SharedLogReport(
            published_tokens=11,
            consumed_tokens=12,
            duplicates=13,
            dropped_tokens=14,
            errors=15,
            malformed=17,
            gaps=18,
            is_connected=True,
            lag_s=1.5,
        ),
    }
    return ServiceFacts(namespaces=tuple(namespaces), **(parts | changes))
