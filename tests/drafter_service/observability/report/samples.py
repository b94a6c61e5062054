"""Plausible, deterministic facts of services for tests, and a server that answers with reports."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np

from drafter_service.observability.facts import (
    Engine,
    EngineUse,
    History,
    Latency,
    ModelIdentity,
    NamespaceFacts,
    Sample,
    ServiceFacts,
)
from drafter_service.observability.report.schema import ClientTotals, CorpusReport, SharedLogReport
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc
from ssd.budget.totals import BudgetTotals, size_of
from ssd.stats import PROB_BINS, Stats, VersionTotals

NOW = 1_795_000_000.0
HOUR = 3600.0


def service(*namespaces, **changes):
    """Return facts of a service that has run for 36 hours."""
    facts = {
        "version": "0.1.0",
        "started_at": NOW - 36 * HOUR,
        "now": NOW,
        "memory_bytes": 1_400_000_000,
        "refused": 3,
        "log": SharedLogReport(
            published_tokens=4_200_000, consumed_tokens=21_000_000, duplicates=17, is_connected=True, lag_s=0.2
        ),
    }
    return ServiceFacts(**{**facts, **changes}, namespaces=namespaces)


def corpus_of(capacity, tokens=0, requests=0, learned=0, **counts):
    """Return facts of a corpus; other counts are 0 by default."""
    others = ("waiting_tokens", "merges", "base_merges", "full_builds", "forgotten_requests")
    return CorpusReport(
        tokens=tokens,
        requests=requests,
        capacity_tokens=capacity,
        learned_tokens=learned,
        **{**dict.fromkeys(others, 0), **counts},
    )


def new_namespace(name="default", **changes):
    """Return facts of an unused namespace."""
    facts = {
        "name": name,
        "model": ModelIdentity("llama-3-8b", "9f86d081884c7d65", "", 128_256),
        "stats": Stats(),
        "history": History(),
        "corpus": corpus_of(16_000_000),
        "clients": ClientTotals(),
        "shadow": Stats(),
        "memory_bytes": 3_000_000,
        "streams": 0,
        "sequences": 0,
    }
    return NamespaceFacts(**{**facts, **changes})


def busy_namespace(name="default", steps=2_000_000, **changes):
    """Return facts of a namespace in use. Up to a million steps, no two of its totals are equal."""
    stats = Stats()
    fill(stats, steps)
    stats.record_version(12_345, VersionTotals(77, 401, 997, 640, 519))
    appended = 9 * steps
    capacity = 16_000_000
    facts = {
        "stats": stats,
        "history": history_of(stats, appended, capacity),
        "corpus": corpus_of(
            capacity,
            min(appended - 9, capacity),
            min(appended, capacity) // 700,
            appended,
            waiting_tokens=812,
            merges=steps // 90,
            base_merges=steps // 4000,
            full_builds=2,
            forgotten_requests=5,
        ),
        "memory_bytes": 196_000_000,
        "streams": 4,
        "sequences": 212,
        "draft_latency": latency_of(steps // 40, 3.2e-4, 0.5),
        "merge_latency": latency_of(steps // 90, 4.1e-3, 0.7),
        "clients": ClientTotals(timeouts=steps // 3000, dropped=steps // 3200, resyncs=4, reconnects=2),
        "budget": budget_totals(),
        "duplicates": 31,
        "libraries": ("handbook",),
        "uses": {
            Engine("vllm/0.32.0 ssd-drafter/0.1.0", "node-3:4711"): engine_use(3, steps // 2, 2 * steps),
            Engine("[/b]\x1b", ""): engine_use(),
        },
    }
    return new_namespace(name, **{**facts, **changes})


def engine_use(streams=0, steps=0, committed=0, engine_steps=0, late_steps=0, offered=0):
    """Return the use of an engine whose draft tokens were not verified."""
    stats = Stats()
    if steps:
        stats.record_path(committed, 0, 0, steps)
    return EngineUse(stats, streams, engine_steps, late_steps, offered)


def budget_totals():
    """Return totals of steps of 1, 3 to 4, 5 to 8 and more than 8192 tokens."""
    totals = BudgetTotals(ignored=3, withheld=41_000)
    for tokens, steps, mean_s, expected_s in (
        (1, 200, 0.02, 0.021),
        (4, 500, 0.022, 0.022),
        (8, 90, 0.03, 0.024),
        (9000, 4, 1.5, 1.0),
    ):
        totals.sizes[size_of(tokens)] = steps, steps * mean_s, steps * expected_s
    return totals


def begun_namespace():
    """Return facts of a namespace in use for 90 seconds."""
    history = History()
    history.record(Sample(NOW - 90, *[0] * 9))
    latency = durations(0.0006, 0.0011)
    return busy_namespace("begun", steps=9, history=history, draft_latency=latency, merge_latency=latency)


def fill(stats, steps):
    """Set counters to plausible values after `steps` sequence steps."""
    counters = stats.counters
    hits = int(0.83 * steps)
    reached = hits * 0.75 ** np.arange(24)
    counters.by_position[:24] = np.stack([reached, 0.8 * reached], axis=1)
    drafted, accepted = counters.by_position.sum(axis=0).tolist()
    counters.steps[:] = steps, steps + accepted, hits
    for table, weights in ((counters.by_source, [13, 5, 1, 1]), (counters.by_age[4:25], range(21, 0, -1))):
        table[:, 0] = np.array(weights) / sum(weights) * drafted
        table[:, 1] = table[:, 0] * np.linspace(0.8, 0.7, len(table))
    prob = (np.arange(PROB_BINS) + 0.5) / PROB_BINS
    count = (drafted * prob**2 / 8).astype(np.int64)
    counters.calibration[:] = np.stack([count, count * prob, count * prob**1.08], axis=1)


def history_of(stats, appended, capacity, samples=300, hours=36):
    """Return a history with a period without steps, in which tokens per step grow up to the totals of `stats`."""
    history = History()
    for part in np.linspace(0, 1, samples).tolist():
        worked = 0.97 * (part if part < 0.4 else max(0.4, part - 0.15)) / 0.85
        steps, accepted, grown = int(stats.steps * worked), int(stats.accepted * worked**1.3), int(appended * worked)
        learned = min(grown, capacity)
        time = NOW - hours * HOUR * (1 - part * (samples - 1) / samples)
        hits, drafted = int(stats.hits * worked**1.1), int(stats.verified * worked**1.2)
        counts = steps, steps + accepted, hits, drafted, accepted, learned, grown
        history.record(Sample(time, *counts, 40_000_000 + int(156_000_000 * learned / capacity), int(600 * worked)))
    return history


def latency_of(count, typical_s, spread_of_log):
    """Return durations with a log-normal distribution around a typical one."""
    latency = Latency()
    for duration in (typical_s * np.exp(np.random.default_rng(1).normal(0, spread_of_log, 400))).tolist():
        latency.record(duration)
    latency.counts = [counted * max(1, count // 400) for counted in latency.counts]
    latency.total_s *= max(1, count // 400)
    return latency


def durations(*seconds):
    """Return a latency of these durations."""
    latency = Latency()
    for each in seconds:
        latency.record(each)
    return latency


EVIL = "<script>alert(1)</script>\"'&<b>\x1b[2J[bold]x[/bold]\n名前" + "x" * 80
"""A name that neither a page nor a terminal may show as it is."""
LAGGING_LOG = SharedLogReport(
    published_tokens=10**15,
    consumed_tokens=10**15,
    duplicates=10**12,
    dropped_tokens=10**12,
    errors=10**12,
    gaps=9,
    is_connected=True,
    lag_s=1e9,
)
SERVICES = {
    "new": lambda: service(),
    "unused": lambda: service(new_namespace()),
    "begun": lambda: service(begun_namespace()),
    "one": lambda: service(busy_namespace()),
    "few": lambda: service(busy_namespace(), busy_namespace("b", steps=3), new_namespace("c")),
    "many": lambda: service(*(busy_namespace(f"team-{n}/a-long-name", steps=10 ** (n % 7 + 1)) for n in range(15))),
    "huge": lambda: service(
        busy_namespace(EVIL, steps=10**17, model=ModelIdentity(EVIL, EVIL, EVIL)),
        memory_bytes=10**18,
        version=EVIL,
        log=LAGGING_LOG,
    ),
}
"""Services that reports are made of."""


class Reporter(drafter_pb2_grpc.DrafterServiceServicer):
    """A gRPC server that answers with `document`, and records the requests."""

    def __init__(self, document="", refusal=None):
        self._document, self._refusal = document, refusal
        self.requests, self.metadata = [], []

    def Report(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.metadata = [(entry.key, entry.value) for entry in context.invocation_metadata()]
        if self._refusal is not None:
            context.abort(*self._refusal)
        return pb.ReportResponse(json=self._document)


@contextmanager
def reporting(address, reporter):
    """Serve `reporter` at `address`."""
    server = grpc.server(ThreadPoolExecutor(2))
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(reporter, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()
