"""All metrics: name, description with unit, and the function that reads the value.

Values of a namespace are rows of numbers, so that the rows of many namespaces can be summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from drafter_service.observability.facts import BOUNDS_S, Latency, NamespaceFacts
from ssd.budget.totals import EXPECTED_S, SECONDS, SIZES, STEPS
from ssd.stats import ACCEPTED, COUNT, OBSERVED, POSITIONS, PREDICTED, PROB_BINS, VERIFIED
from ssd.types import Source

LABELS = ("namespace",)
VLLM_LABELS = ("engine", "model_name", "namespace")
"""Labels of metrics under vLLM's names; dashboards for vLLM expect the first two."""

BUCKETS = (*(f"{bound:.6g}" for bound in BOUNDS_S[::2]), "+Inf")
"""Upper bounds of histogram buckets in seconds: every second bound of `Latency`."""
_BUCKET_STARTS = (0, *range(1, len(BOUNDS_S) + 1, 2))

SOURCES = tuple(source.name.lower() for source in Source)
LENGTHS = ("00", "01", "02", "03-04", "05-08", "09-16", "17-32", "33-63", "64+")
LENGTH_STARTS = (0, 1, 2, 3, 5, 9, 17, 33, 64)
AGES = ("2^08", "2^12", "2^16", "2^20", "2^24", "2^28", "2^40")
AGE_STARTS = (0, 9, 13, 17, 21, 25, 29)
"""Row b of the table counts ages of b bits: below 2 ** b."""
PROB_STARTS = tuple(range(0, PROB_BINS, 2))
PROBS = tuple(f"{start / PROB_BINS:.1f}-{(start + 2) / PROB_BINS:.1f}" for start in PROB_STARTS)

STEP_SIZES = (*(f"{1 << power:04d}" for power in range(SIZES - 1)), "more")
"""Maximum numbers of tokens of a step."""

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
    is_cut: bool = False
    """Whether label values after the last one with a count are left out."""
    labels: tuple[str, ...] = LABELS


@dataclass(frozen=True)
class Histogram:
    """A distribution of durations. Its row has the count of each bucket, not cumulative, then the sum in seconds."""

    name: str
    help: str
    latency: Callable[[NamespaceFacts], Latency]
    values: tuple[str, ...] = (*BUCKETS, "sum")
    labels: tuple[str, ...] = LABELS

    def read(self, facts: NamespaceFacts) -> np.ndarray:
        """Return float64 [buckets + 1]."""
        latency = self.latency(facts)
        return np.append(np.add.reduceat(np.array(latency.counts, np.float64), _BUCKET_STARTS), latency.total_s)


class Number(NamedTuple):
    """A gauge, or a counter if the name ends with `_total`."""

    name: str
    help: str
    read: Callable[[Any], float]
    """Function that reads the number from the facts of a namespace, the service or the shared log."""


def _counter(name: str, path: str, text: str, labels: tuple[str, ...] = LABELS) -> Counter:
    return Counter(name, text, attrgetter(path), labels=labels)


def _number(name: str, path: str, text: str) -> Number:
    return Number(name, text, attrgetter(path))


def _ranges(table: str, column: int, starts: tuple[int, ...]) -> Read:
    """Return a function that sums a column of one of the tables in `Stats` over ranges of rows."""

    def read(facts: NamespaceFacts) -> np.ndarray:
        rows: Any = getattr(facts.stats.counters, table)
        return np.add.reduceat(rows[:, column], starts)

    return read


def _by_source(name: str, text: str, column: int) -> Counter:
    return Counter(name, text, _ranges("by_source", column, tuple(Source)), "source", SOURCES)


def _by_length(name: str, text: str, column: int) -> Counter:
    return Counter(name, text, _ranges("by_length", column, LENGTH_STARTS), "match_length", LENGTHS)


def _by_path_prob(name: str, text: str, column: int) -> Counter:
    return Counter(name, text, _ranges("calibration", column, PROB_STARTS), "path_prob", PROBS)


def _by_step_size(name: str, text: str, column: int) -> Counter:
    return Counter(name, text, lambda facts: facts.budget.sizes[:, column], "step_tokens", STEP_SIZES, is_cut=True)


COUNTERS: tuple[Counter | Histogram, ...] = (
    _counter(
        "vllm:spec_decode_num_drafts_total",
        "stats.hits",
        "Drafts that were verified, one per sequence and step.",
        VLLM_LABELS,
    ),
    _counter(
        "vllm:spec_decode_num_draft_tokens_total", "stats.verified", "Draft tokens that were verified.", VLLM_LABELS
    ),
    _counter(
        "vllm:spec_decode_num_accepted_tokens_total",
        "stats.accepted",
        "Draft tokens that were accepted, without bonus tokens.",
        VLLM_LABELS,
    ),
    Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "Draft tokens that were accepted, by position in the draft, from 0.",
        _ranges("by_position", ACCEPTED, tuple(range(POSITIONS))),
        "position",
        tuple(map(str, range(POSITIONS))),
        is_cut=True,
        labels=VLLM_LABELS,
    ),
    _counter("ssd_drafter_steps_total", "stats.steps", "Sequence steps, with or without a draft."),
    _counter("ssd_drafter_hits_total", "stats.hits", "Sequence steps in which a draft was verified."),
    _counter(
        "ssd_drafter_committed_tokens_total",
        "stats.committed",
        "Tokens that the targets produced: accepted draft tokens and bonus tokens.",
    ),
    _by_source("ssd_drafter_verified_tokens_total", "Draft tokens that were verified, by source.", VERIFIED),
    _by_source("ssd_drafter_accepted_tokens_total", "Draft tokens that were accepted, by source.", ACCEPTED),
    _by_length(
        "ssd_drafter_verified_tokens_by_match_length_total",
        "Draft tokens that were verified, by the number of context tokens that matched.",
        VERIFIED,
    ),
    _by_length(
        "ssd_drafter_accepted_tokens_by_match_length_total",
        "Draft tokens that were accepted, by the number of context tokens that matched.",
        ACCEPTED,
    ),
    Counter(
        "ssd_drafter_accepted_tokens_by_age_total",
        "Draft tokens that were accepted, by age of their text: fewer tokens than this were learned since.",
        _ranges("by_age", ACCEPTED, AGE_STARTS),
        "age",
        AGES,
    ),
    _by_path_prob(
        "ssd_drafter_verified_tokens_by_path_prob_total",
        "Draft tokens that were verified, by path probability.",
        COUNT,
    ),
    _by_path_prob(
        "ssd_drafter_predicted_tokens_by_path_prob_total",
        "Expected number of accepted draft tokens, the sum of path probabilities, by path probability.",
        PREDICTED,
    ),
    _by_path_prob(
        "ssd_drafter_accepted_tokens_by_path_prob_total",
        "Draft tokens that were accepted, by path probability.",
        OBSERVED,
    ),
    _by_step_size(
        "ssd_drafter_recorded_steps_total",
        "Engine steps whose durations were recorded, by number of tokens, at most this.",
        STEPS,
    ),
    _by_step_size(
        "ssd_drafter_step_seconds_total", "Seconds that the recorded engine steps took, by number of tokens.", SECONDS
    ),
    _by_step_size(
        "ssd_drafter_expected_step_seconds_total",
        "Seconds that the recorded engine steps were expected to take, by number of tokens.",
        EXPECTED_S,
    ),
    _counter(
        "ssd_drafter_ignored_steps_total",
        "budget.ignored",
        "Engine steps that were ignored because their reported values are impossible.",
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
    _counter(
        "ssd_drafter_forgotten_requests_total",
        "corpus.forgotten_requests",
        "Requests forgotten on demand; pieces of long requests count separately.",
    ),
    _counter(
        "ssd_drafter_duplicate_texts_total", "duplicates", "Texts that were sent again after they had been learned."
    ),
    _counter("ssd_drafter_merges_total", "corpus.merges", "Times that finished requests became draftable."),
    _counter(
        "ssd_drafter_base_merges_total",
        "corpus.base_merges",
        "Merges into the base tier, the largest part of the suffix array.",
    ),
    _counter("ssd_drafter_full_builds_total", "corpus.full_builds", "Times that the whole suffix array was sorted."),
    _counter(
        "ssd_drafter_client_dropped_answers_total",
        "clients.dropped",
        "Answers that clients dropped because they came too late.",
    ),
    _counter(
        "ssd_drafter_client_resyncs_total",
        "clients.resyncs",
        "Sequences that clients sent again because the service did not have them.",
    ),
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
    _counter(
        "ssd_drafter_shadow_verified_tokens_total",
        "shadow.stats.verified",
        "Draft tokens of shadow mode that the target would have verified.",
    ),
    _counter(
        "ssd_drafter_shadow_accepted_tokens_total",
        "shadow.stats.accepted",
        "Draft tokens of shadow mode that the target would have accepted.",
    ),
    Histogram(
        "ssd_drafter_draft_latency_seconds",
        "Seconds that the service takes to answer one message, which requests the drafts of a whole batch.",
        lambda facts: facts.draft_latency,
    ),
    Histogram(
        "ssd_drafter_merge_latency_seconds",
        "Seconds to make finished requests draftable; refreshes that merged nothing are not counted.",
        lambda facts: facts.merge_latency,
    ),
)

GAUGES = (
    _number("ssd_drafter_corpus_tokens", "corpus.tokens", "Tokens remembered now, including separators."),
    _number("ssd_drafter_corpus_capacity_tokens", "corpus.capacity_tokens", "Maximum number of tokens remembered."),
    _number(
        "ssd_drafter_corpus_requests",
        "corpus.requests",
        "Requests remembered now; pieces of long requests count separately.",
    ),
    _number("ssd_drafter_waiting_tokens", "corpus.waiting_tokens", "Tokens learned but not draftable yet."),
    _number("ssd_drafter_memory_bytes", "memory_bytes", "Memory of the namespace in bytes."),
    _number("ssd_drafter_streams", "streams", "Engine streams connected now."),
    _number("ssd_drafter_sequences", "sequences", "Sequences running now."),
)

INFO = "ssd_drafter"
"""Name of the info metric; the Prometheus client appends `_info`."""
INFO_HELP = "Always 1; the label is the version of the service."

SERVICE_METRICS = (
    Number("ssd_drafter_namespaces", "Namespaces in memory now.", lambda facts: len(facts.namespaces)),
    _number("ssd_drafter_resident_memory_bytes", "memory_bytes", "Resident memory of the whole process in bytes."),
    _number("ssd_drafter_start_time_seconds", "started_at", "Start time of the service, in seconds since 1970."),
    _number("ssd_drafter_refused_total", "refused", "Requests and streams that were refused."),
    _number("ssd_drafter_failed_saves_total", "failed_saves", "Snapshots that could not be saved."),
    _number("ssd_drafter_memory_limit_bytes", "memory_limit", "Maximum memory of all namespaces in bytes."),
    _number(
        "ssd_drafter_unevictable_memory_bytes",
        "unevictable_bytes",
        "Bytes that the memory limit counts for namespaces that cannot be unloaded: in use, or no snapshot folder.",
    ),
)

LOG_METRICS = (
    _number("ssd_drafter_log_connected", "is_connected", "1 while the shared log can be reached, else 0."),
    _number("ssd_drafter_log_lag_entries", "lag_entries", "Entries of the log not read yet."),
    _number("ssd_drafter_log_lag_seconds", "lag_s", "Seconds by which this replica is behind the log."),
    _number("ssd_drafter_log_published_tokens_total", "published_tokens", "Tokens that this replica wrote to the log."),
    _number(
        "ssd_drafter_log_consumed_tokens_total", "consumed_tokens", "Tokens of other replicas learned from the log."
    ),
    _number("ssd_drafter_log_duplicates_total", "duplicates", "Texts in the log that had already been learned."),
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
    _number("ssd_drafter_log_errors_total", "errors", "Failed calls to the log."),
)
