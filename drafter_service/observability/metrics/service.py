"""The metrics of the service as a whole and of its shared log: names, meaning and unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from drafter_service.observability.facts import LogFacts, ServiceFacts


class ServiceMetric(NamedTuple):
    """A number of the service: a counter if the name ends with `_total`, else a gauge."""

    name: str
    help: str
    read: Callable[[ServiceFacts], float]


class LogMetric(NamedTuple):
    """A number of the shared log, there only if there is a log."""

    name: str
    help: str
    read: Callable[[LogFacts], float]


INFO = "ssd_drafter"
"""Prometheus adds `_info`."""
INFO_HELP = "Always 1; the label says which version runs."

SERVICE_METRICS = (
    ServiceMetric("ssd_drafter_namespaces", "Namespaces in memory now.", lambda facts: len(facts.namespaces)),
    ServiceMetric(
        "ssd_drafter_resident_memory_bytes", "Bytes of memory of the whole process.", lambda facts: facts.memory_bytes
    ),
    ServiceMetric(
        "ssd_drafter_start_time_seconds",
        "When the service started, in seconds since 1970.",
        lambda facts: facts.started_at,
    ),
    ServiceMetric(
        "ssd_drafter_refused_total",
        "Requests and streams that were refused.",
        lambda facts: facts.refused,
    ),
    ServiceMetric(
        "ssd_drafter_failed_saves_total",
        "Snapshots that could not be saved.",
        lambda facts: facts.failed_saves,
    ),
)

LOG_METRICS = (
    LogMetric(
        "ssd_drafter_log_connected",
        "1 while the shared log answers, else 0.",
        lambda log: bool(log.is_connected),
    ),
    LogMetric("ssd_drafter_log_lag_entries", "Entries of the log not read yet.", lambda log: log.lag_entries),
    LogMetric("ssd_drafter_log_lag_seconds", "Seconds that the log is ahead of this replica.", lambda log: log.lag_s),
    LogMetric(
        "ssd_drafter_log_published_tokens_total",
        "Tokens written to the log.",
        lambda log: log.published_tokens,
    ),
    LogMetric(
        "ssd_drafter_log_consumed_tokens_total",
        "Tokens of other replicas learned from the log.",
        lambda log: log.consumed_tokens,
    ),
    LogMetric(
        "ssd_drafter_log_duplicates_total",
        "Texts in the log that had been learned before.",
        lambda log: log.duplicates,
    ),
    LogMetric(
        "ssd_drafter_log_dropped_tokens_total",
        "Tokens that never reached the log since too many waited for it.",
        lambda log: log.dropped_tokens,
    ),
    LogMetric(
        "ssd_drafter_log_malformed_entries_total",
        "Entries of the log that were skipped.",
        lambda log: log.malformed,
    ),
    LogMetric(
        "ssd_drafter_log_gaps_total",
        "Times that entries may have been missed: trimmed before they were read, or lost with Redis.",
        lambda log: log.gaps,
    ),
    LogMetric("ssd_drafter_log_errors_total", "Failed exchanges with the log.", lambda log: log.errors),
)
