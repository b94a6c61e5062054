"""All metrics: name, the function that reads the value, and description with unit.

A metric is exported if an alert uses it, or if it says whether drafting works and what it gains. Reports have the rest.
A value that is a field of the report has that field's description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel

from drafter_service.observability.facts import BOUNDS_S
from drafter_service.observability.report.schema import (
    BudgetReport,
    ClientReport,
    ClientTotals,
    CorpusReport,
    HitTally,
    NamespaceReport,
    ServiceReport,
    ShadowReport,
    SharedLogReport,
)
from ssd.budget.totals import EXPECTED_S, SECONDS, STEPS
from ssd.stats import ACCEPTED, VERIFIED
from ssd.types import Source

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
    _field("ssd_drafter_shadow_observed_requests_total", "shadow.observed", ShadowReport, "observed_requests"),
    _field("ssd_drafter_shadow_scored_requests_total", "shadow.scored", ShadowReport, "scored_requests"),
    Metric(
        "ssd_drafter_shadow_steps_total",
        "Sequence steps that requests in shadow mode would have taken with their drafts.",
        attrgetter("shadow.stats.steps"),
    ),
    Metric(
        "ssd_drafter_shadow_committed_tokens_total",
        "Tokens that the target produced in the scored requests of shadow mode.",
        attrgetter("shadow.stats.committed"),
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
