"""All metrics: name, description with unit, and the function that reads the value.

A metric is exported if an alert uses it, or if it says whether drafting works and what it gains. Reports have the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from drafter_service.observability.facts import BOUNDS_S, Latency, NamespaceFacts
from ssd.budget.totals import EXPECTED_S, SECONDS, STEPS
from ssd.stats import ACCEPTED, VERIFIED
from ssd.types import Source

BUCKETS = (*(f"{bound:.6g}" for bound in BOUNDS_S[::2]), "+Inf")
"""Upper bounds of histogram buckets in seconds: every second bound of `Latency`."""
_BUCKET_STARTS = (0, *range(1, len(BOUNDS_S) + 1, 2))

SOURCES = tuple(source.name.lower() for source in Source)

Numbers = np.ndarray | float
Read = Callable[[NamespaceFacts], Numbers]


@dataclass(frozen=True)
class Counter:
    """A number that only grows, or one such number for each value of a label."""

    name: str
    help: str
    read: Read
    """Function that returns one number for each label value."""
    label: str = ""
    values: tuple[str, ...] = ("",)
    """Values of the label."""


@dataclass(frozen=True)
class Histogram:
    """A distribution of durations. Its row has the count of each bucket, not cumulative, then the sum in seconds."""

    name: str
    help: str
    latency: Callable[[NamespaceFacts], Latency]
    values: tuple[str, ...] = (*BUCKETS, "sum")

    def read(self, facts: NamespaceFacts) -> np.ndarray:
        """Return float64 [buckets + 1]."""
        latency = self.latency(facts)
        return np.append(np.add.reduceat(np.array(latency.counts, np.float64), _BUCKET_STARTS), latency.total_s)


class Number(NamedTuple):
    """A gauge, or a counter if the name ends with `_total`."""

    name: str
    help: str
    read: Callable[[Any], float]
    """Function that reads the number from the facts of a namespace, the service, the log, or an engine."""


def _counter(name: str, path: str, text: str) -> Counter:
    return Counter(name, text, attrgetter(path))


def _number(name: str, path: str, text: str) -> Number:
    return Number(name, text, attrgetter(path))


def _by_source(name: str, text: str, column: int) -> Counter:
    return Counter(name, text, lambda facts: facts.stats.counters.by_source[:, column], "source", SOURCES)


def _of_steps(name: str, text: str, column: int) -> Counter:
    return Counter(name, text, lambda facts: facts.budget.sizes[:, column].sum())


COUNTERS: tuple[Counter | Histogram, ...] = (
    _counter("ssd_drafter_steps_total", "stats.steps", "Sequence steps, with or without a draft."),
    _counter("ssd_drafter_hits_total", "stats.hits", "Sequence steps in which a draft was verified."),
    _counter(
        "ssd_drafter_committed_tokens_total",
        "stats.committed",
        "Tokens that the targets produced: accepted draft tokens and bonus tokens.",
    ),
    _by_source("ssd_drafter_verified_tokens_total", "Draft tokens that were verified, by source.", VERIFIED),
    _by_source("ssd_drafter_accepted_tokens_total", "Draft tokens that were accepted, by source.", ACCEPTED),
    _of_steps("ssd_drafter_recorded_steps_total", "Engine steps whose durations were recorded.", STEPS),
    _of_steps("ssd_drafter_step_seconds_total", "Seconds that the recorded engine steps took.", SECONDS),
    _of_steps(
        "ssd_drafter_expected_step_seconds_total",
        "Seconds that the recorded engine steps were expected to take.",
        EXPECTED_S,
    ),
    _counter(
        "ssd_drafter_withheld_tokens_total",
        "budget.withheld",
        "Draft tokens that were not verified because they were not worth the time.",
    ),
    _counter(
        "ssd_drafter_appended_tokens_total",
        "corpus.learned_tokens",
        "Tokens learned, including those forgotten or overwritten since.",
    ),
    _counter("ssd_drafter_merges_total", "corpus.merges", "Times that finished requests became draftable."),
    _counter("ssd_drafter_client_reconnects_total", "clients.reconnects", "Connections that clients re-established."),
    _counter(
        "ssd_drafter_shadow_observed_requests_total",
        "shadow.observed",
        "Finished requests whose drafts were withheld (shadow mode).",
    ),
    _counter(
        "ssd_drafter_shadow_scored_requests_total",
        "shadow.scored",
        "Requests in shadow mode whose drafts were compared with their outputs.",
    ),
    _counter(
        "ssd_drafter_shadow_steps_total",
        "shadow.stats.steps",
        "Sequence steps that requests in shadow mode would have taken with their drafts.",
    ),
    _counter(
        "ssd_drafter_shadow_committed_tokens_total",
        "shadow.stats.committed",
        "Tokens that the target produced in the scored requests of shadow mode.",
    ),
    Histogram(
        "ssd_drafter_draft_latency_seconds",
        "Seconds that the service takes to answer one message, which requests the drafts of a whole batch.",
        lambda facts: facts.draft_latency,
    ),
)

GAUGES = (
    _number("ssd_drafter_corpus_tokens", "corpus.tokens", "Tokens remembered now, including separators."),
    _number("ssd_drafter_corpus_capacity_tokens", "corpus.capacity_tokens", "Maximum number of tokens remembered."),
    _number("ssd_drafter_waiting_tokens", "corpus.waiting_tokens", "Tokens learned but not draftable yet."),
    _number("ssd_drafter_memory_bytes", "memory_bytes", "Memory of the namespace in bytes."),
    _number("ssd_drafter_streams", "streams", "Engine streams connected now."),
    _number("ssd_drafter_sequences", "sequences", "Sequences running now."),
)

ENGINE_METRICS = (
    Number(
        "ssd_drafter_engine_connected",
        "1 while the engine is connected, 0 for an hour after it was.",
        lambda use: int(use.streams > 0),
    ),
    _number(
        "ssd_drafter_engine_steps_total",
        "engine_steps",
        "Engine steps with a request for drafts, or with none because earlier answers were late.",
    ),
    _number(
        "ssd_drafter_engine_late_steps_total",
        "late_steps",
        "Engine steps among them without drafts because the answer was late.",
    ),
    _number("ssd_drafter_engine_sequence_steps_total", "stats.steps", "Sequence steps, with or without a draft."),
    _number(
        "ssd_drafter_engine_committed_tokens_total",
        "stats.committed",
        "Tokens that the target produced: accepted draft tokens and bonus tokens.",
    ),
)

INFO = "ssd_drafter"
"""Name of the info metric; the Prometheus client appends `_info`."""
INFO_HELP = "Always 1; the label is the version of the service."

SERVICE_METRICS = (
    Number("ssd_drafter_namespaces", "Namespaces in memory now.", lambda facts: len(facts.namespaces)),
    _number("ssd_drafter_refused_total", "refused", "Requests and streams that were refused."),
    _number("ssd_drafter_failed_saves_total", "failed_saves", "Snapshots that could not be saved."),
    _number("ssd_drafter_failed_loads_total", "failed_loads", "Times that a stored namespace could not be loaded."),
    Number(
        "ssd_drafter_set_aside_files",
        "Damaged files in the snapshot folder that were set aside.",
        lambda facts: sum(map(len, facts.set_aside.values())),
    ),
    _number("ssd_drafter_memory_limit_bytes", "memory_limit", "Maximum memory of all namespaces in bytes."),
    _number(
        "ssd_drafter_unevictable_memory_bytes",
        "unevictable_bytes",
        "Bytes that the memory limit counts for namespaces that cannot be unloaded: in use, or no snapshot folder.",
    ),
)

LOG_METRICS = (
    _number("ssd_drafter_log_connected", "is_connected", "1 while the shared log can be reached, else 0."),
    _number("ssd_drafter_log_lag_seconds", "lag_s", "Seconds by which this replica is behind the log."),
    _number("ssd_drafter_log_published_tokens_total", "published_tokens", "Tokens that this replica wrote to the log."),
    _number(
        "ssd_drafter_log_consumed_tokens_total", "consumed_tokens", "Tokens of other replicas learned from the log."
    ),
    _number(
        "ssd_drafter_log_dropped_tokens_total",
        "dropped_tokens",
        "Tokens never written to the log because too many were waiting.",
    ),
    _number("ssd_drafter_log_malformed_entries_total", "malformed", "Invalid entries of the log, which were skipped."),
    _number(
        "ssd_drafter_log_gaps_total",
        "gaps",
        "Times that entries may have been missed: trimmed before they were read, or lost with Redis.",
    ),
)
