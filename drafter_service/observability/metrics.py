"""Prometheus metrics: their list, the facts of the service that they are read from, and the endpoint.

`docs/operations.md` lists them; a test compares both.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from itertools import accumulate
from operator import attrgetter
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any, NamedTuple

import structlog
from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel

from drafter_service.observability.facts import BOUNDS_S, Latency, ServiceFacts
from drafter_service.observability.report.schema import (
    BudgetReport,
    ClientReport,
    ClientTotals,
    CorpusReport,
    HitTally,
    NamespaceReport,
    ServiceReport,
    SharedLogReport,
)
from drafter_service.transport.address import Address
from ssd.budget.totals import EXPECTED_S, SECONDS, STEPS
from ssd.errors import UserError
from ssd.stats import ACCEPTED, VERIFIED
from ssd.types import Source

logger = structlog.get_logger(__name__)

BUCKETS = (*(f"{bound:.6g}" for bound in BOUNDS_S[::2]), "+Inf")
"""Upper bounds of histogram buckets in seconds: every second bound of `Latency`."""
SOURCES = tuple(source.name.lower() for source in Source)


class Metric(NamedTuple):
    """A counter if the name ends with `_total`, a histogram if it ends with `_latency_seconds`, else a gauge."""

    name: str
    help: str
    read: Callable[[Any], Any]
    """Function that reads the number, the numbers of all label values, or a `Latency`, from the facts of the service,
    the log, a namespace, or an engine."""
    label: str = ""
    values: Sequence[str] = ()
    """Values of the label."""


def _field(name: str, path: str, part: type[BaseModel], field: str) -> Metric:
    """Return a metric with the description of a field of the report."""
    return Metric(name, part.model_fields[field].description or "", attrgetter(path))


def _by_source(name: str, text: str, column: int) -> Metric:
    return Metric(name, text, lambda facts: facts.stats.counters.by_source[:, column].tolist(), "source", SOURCES)


def _of_steps(name: str, text: str, column: int) -> Metric:
    return Metric(name, text, lambda facts: facts.budget.sizes[:, column].sum())


NAMESPACE_METRICS = (
    _field("ssd_drafter_steps_total", "stats.steps", HitTally, "steps"),
    _field("ssd_drafter_hits_total", "stats.hits", HitTally, "hits"),
    _field("ssd_drafter_committed_tokens_total", "stats.committed", HitTally, "committed"),
    _by_source("ssd_drafter_verified_tokens_total", "Draft tokens that were verified, by source.", VERIFIED),
    _by_source("ssd_drafter_accepted_tokens_total", "Draft tokens that were accepted, by source.", ACCEPTED),
    _of_steps("ssd_drafter_recorded_steps_total", "Engine steps whose durations were recorded.", STEPS),
    _of_steps("ssd_drafter_step_seconds_total", "Seconds that the recorded engine steps took.", SECONDS),
    _of_steps(
        "ssd_drafter_expected_step_seconds_total",
        "Seconds that the recorded engine steps were expected to take.",
        EXPECTED_S,
    ),
    _field("ssd_drafter_withheld_tokens_total", "budget.withheld", BudgetReport, "withheld_tokens"),
    _field("ssd_drafter_appended_tokens_total", "corpus.learned_tokens", CorpusReport, "learned_tokens"),
    _field("ssd_drafter_merges_total", "corpus.merges", CorpusReport, "merges"),
    _field("ssd_drafter_client_reconnects_total", "clients.reconnects", ClientTotals, "reconnects"),
    Metric(
        "ssd_drafter_shadow_steps_total",
        "Sequence steps that requests in shadow mode would have taken with their drafts.",
        attrgetter("shadow.steps"),
    ),
    Metric(
        "ssd_drafter_shadow_committed_tokens_total",
        "Tokens that the target produced in the requests of shadow mode.",
        attrgetter("shadow.committed"),
    ),
    Metric(
        "ssd_drafter_draft_latency_seconds",
        "Seconds that the service takes to answer one message, which requests the drafts of a whole batch.",
        attrgetter("draft_latency"),
    ),
    _field("ssd_drafter_corpus_tokens", "corpus.tokens", CorpusReport, "tokens"),
    _field("ssd_drafter_corpus_capacity_tokens", "corpus.capacity_tokens", CorpusReport, "capacity_tokens"),
    _field("ssd_drafter_waiting_tokens", "corpus.waiting_tokens", CorpusReport, "waiting_tokens"),
    _field("ssd_drafter_memory_bytes", "memory_bytes", NamespaceReport, "memory_bytes"),
    _field("ssd_drafter_streams", "streams", NamespaceReport, "streams"),
    Metric(
        "ssd_drafter_copies",
        "Copies of the corpus in engines that are connected now.",
        lambda facts: len(facts.copies),
    ),
    Metric(
        "ssd_drafter_copy_missing_changes",
        "Texts learned or forgotten that were not sent yet to the copy that lacks most of them.",
        lambda facts: max((each.missing_changes for each in facts.copies), default=0),
    ),
    _field("ssd_drafter_sequences", "sequences", NamespaceReport, "sequences"),
)

ENGINE_METRICS = (
    Metric(
        "ssd_drafter_engine_connected",
        "1 while the engine is connected, 0 for an hour after it was.",
        lambda use: int(use.streams > 0),
    ),
    _field("ssd_drafter_engine_steps_total", "engine_steps", ClientReport, "engine_steps"),
    _field("ssd_drafter_engine_late_steps_total", "late_steps", ClientReport, "late_steps"),
    _field("ssd_drafter_engine_sequence_steps_total", "stats.steps", ClientReport, "steps"),
    _field("ssd_drafter_engine_committed_tokens_total", "stats.committed", ClientReport, "committed"),
)

INFO = "ssd_drafter"
"""Name of the info metric; the Prometheus client appends `_info`."""
INFO_HELP = "Always 1; the label is the version of the service."

SERVICE_METRICS = (
    Metric("ssd_drafter_namespaces", "Namespaces in memory now.", lambda facts: len(facts.namespaces)),
    _field("ssd_drafter_refused_total", "refused", ServiceReport, "refused"),
    Metric("ssd_drafter_failed_saves_total", "Snapshots that could not be saved.", attrgetter("failed_saves")),
    Metric(
        "ssd_drafter_failed_loads_total",
        "Times that a stored namespace could not be loaded.",
        attrgetter("failed_loads"),
    ),
    Metric(
        "ssd_drafter_set_aside_files",
        "Damaged files in the snapshot folder that were set aside.",
        lambda facts: sum(map(len, facts.set_aside.values())),
    ),
    Metric("ssd_drafter_memory_limit_bytes", "Maximum memory of all namespaces in bytes.", attrgetter("memory_limit")),
    Metric(
        "ssd_drafter_unevictable_memory_bytes",
        "Bytes that the memory limit counts for namespaces that cannot be unloaded: in use, or no snapshot folder.",
        attrgetter("unevictable_bytes"),
    ),
)

LOG_METRICS = (
    Metric("ssd_drafter_log_connected", "1 while the shared log can be reached, else 0.", attrgetter("is_connected")),
    _field("ssd_drafter_log_lag_seconds", "lag_s", SharedLogReport, "lag_s"),
    _field("ssd_drafter_log_published_tokens_total", "published_tokens", SharedLogReport, "published_tokens"),
    _field("ssd_drafter_log_consumed_tokens_total", "consumed_tokens", SharedLogReport, "consumed_tokens"),
    _field("ssd_drafter_log_dropped_tokens_total", "dropped_tokens", SharedLogReport, "dropped_tokens"),
    _field("ssd_drafter_log_malformed_entries_total", "malformed", SharedLogReport, "malformed"),
    _field("ssd_drafter_log_gaps_total", "gaps", SharedLogReport, "gaps"),
)


# --- Collection

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

    def collect(self) -> Iterator[MetricFamily]:
        """Yield all families, with a pause around each in which the thread that answers engines can run."""
        for family in self._families():
            time.sleep(PAUSE_S)
            yield family
            time.sleep(PAUSE_S)

    def _families(self) -> Iterator[MetricFamily]:
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
    metrics: Iterable[Metric], labels: Sequence[str], items: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[MetricFamily]:
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


# --- The endpoint, in threads of its own

ANSWER_S = 5.0
"""Maximum time for the event loop to return the facts; Prometheus itself waits for 10 s."""
POLL_S = 0.1
RETRY_S = 1.0
"""Time before connections are accepted again after the process had no free descriptor for one."""


class MetricsEndpoint:
    """Serves `/metrics` from `start` to `stop`."""

    def __init__(self, facts: Callable[[], ServiceFacts], address: str) -> None:
        """Make an endpoint that does not listen yet.

        facts: called in other threads; see `facts_from_loop`. Raises UserError if `address` is not HOST:PORT.
        """
        self.address = Address.parse(address)
        """After `start`, with the actual port."""
        if self.address.socket_path is not None:
            raise UserError(
                "reports.metrics: Prometheus reads from HOST:PORT, such as 127.0.0.1:9400, not from a socket"
            )
        self.registry = CollectorRegistry()
        self.registry.register(DrafterCollector(facts))
        ProcessCollector(registry=self.registry)
        self._server: _Server | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start serving. Raises UserError if the address cannot be used."""
        host, _, port = self.address.text.rpartition(":")
        try:
            self._server = _Server((host.strip("[]"), int(port)), _Handler.factory(self.registry))
        except OSError as problem:
            raise UserError(
                f"reports.metrics: cannot serve at {self.address.text}: {problem.strerror}; choose another address"
            ) from None
        self.address = self.address.at_port(self._server.server_address[1])
        self._thread = Thread(target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = self._thread = None


class _Handler(MetricsHandler):
    """Answers scrapes, and logs those that failed."""

    timeout = 10.0
    """Seconds to receive a request."""

    def do_GET(self) -> None:  # noqa: N802
        """Answer a scrape."""
        try:
            super().do_GET()
        except TimeoutError:
            # The base class would mistake this for a slow client and log nothing.
            logger.warning("metrics not sent: the service is busy")
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, handler)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Raises OSError, after which the base class would try again without a pause."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(RETRY_S)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        logger.warning("metrics not sent", exc_info=True)


def facts_from_loop(loop: asyncio.AbstractEventLoop, facts: Callable[[], ServiceFacts]) -> Callable[[], ServiceFacts]:
    """Return a function for other threads that calls `facts` in the event loop, or raises TimeoutError."""

    async def answer() -> ServiceFacts:
        return facts()

    return lambda: asyncio.run_coroutine_threadsafe(answer(), loop).result(ANSWER_S)
