"""Every metric of a namespace: its name, what it means and in which unit, and where it is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from drafter_service.observability.facts import NamespaceFacts
from drafter_service.observability.metrics.kinds import VLLM_LABELS, Counter, Gauge, Histogram, Read
from ssd.stats import ACCEPTED, COUNT, KEPT_COUNT, ODDS_BINS, POSITIONS, PROMISED, VERIFIED
from ssd.types import Source

SOURCES = tuple(source.name.lower() for source in Source)
LENGTHS = ("00", "01", "02", "03-04", "05-08", "09-16", "17-32", "33-63", "64+")
LENGTH_STARTS = (0, 1, 2, 3, 5, 9, 17, 33, 64)
AGES = ("2^08", "2^12", "2^16", "2^20", "2^24", "2^28", "2^40")
AGE_STARTS = (0, 9, 13, 17, 21, 25, 29)
"""Row b of the table has ages of b bits: below 2 ** b."""
ODDS_STARTS = tuple(range(0, ODDS_BINS, 2))
ODDS = tuple(f"{start / ODDS_BINS:.1f}-{(start + 2) / ODDS_BINS:.1f}" for start in ODDS_STARTS)


def _ranges(table: str, column: int, starts: tuple[int, ...]) -> Read:
    """A column of one of the tables in `Stats`, summed over ranges of its rows."""

    def read(facts: NamespaceFacts) -> np.ndarray:
        rows: Any = getattr(facts.stats.counters, table)
        return np.add.reduceat(rows[:, column], starts)

    return read


def _by_source(column: int) -> Read:
    return _ranges("by_source", column, tuple(Source))


COUNTERS: tuple[Counter | Histogram, ...] = (
    Counter(
        "vllm:spec_decode_num_drafts_total",
        "Drafts that were verified, one a sequence and step.",
        lambda facts: facts.stats.hits,
        labels=VLLM_LABELS,
    ),
    Counter(
        "vllm:spec_decode_num_draft_tokens_total",
        "Draft tokens that were verified.",
        lambda facts: facts.stats.verified,
        labels=VLLM_LABELS,
    ),
    Counter(
        "vllm:spec_decode_num_accepted_tokens_total",
        "Draft tokens that were accepted, without bonus tokens.",
        lambda facts: facts.stats.accepted,
        labels=VLLM_LABELS,
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
    Counter("ssd_drafter_steps_total", "Sequence steps, with or without a draft.", lambda facts: facts.stats.steps),
    Counter(
        "ssd_drafter_hits_total",
        "Sequence steps in which a draft was verified.",
        lambda facts: facts.stats.hits,
    ),
    Counter(
        "ssd_drafter_committed_tokens_total",
        "Tokens that targets produced: accepted draft tokens and their own.",
        lambda facts: facts.stats.committed,
    ),
    Counter(
        "ssd_drafter_verified_tokens_total",
        "Draft tokens that were verified, by where they were found.",
        _by_source(VERIFIED),
        "source",
        SOURCES,
    ),
    Counter(
        "ssd_drafter_accepted_tokens_total",
        "Draft tokens that were accepted, by where they were found.",
        _by_source(ACCEPTED),
        "source",
        SOURCES,
    ),
    Counter(
        "ssd_drafter_verified_tokens_by_match_length_total",
        "Draft tokens that were verified, by the tokens of context that were found before them.",
        _ranges("by_length", VERIFIED, LENGTH_STARTS),
        "match_length",
        LENGTHS,
    ),
    Counter(
        "ssd_drafter_accepted_tokens_by_match_length_total",
        "Draft tokens that were accepted, by the tokens of context that were found before them.",
        _ranges("by_length", ACCEPTED, LENGTH_STARTS),
        "match_length",
        LENGTHS,
    ),
    Counter(
        "ssd_drafter_accepted_tokens_by_age_total",
        "Draft tokens that were accepted, by age of their text: fewer tokens than this were learned since.",
        _ranges("by_age", ACCEPTED, AGE_STARTS),
        "age",
        AGES,
    ),
    Counter(
        "ssd_drafter_verified_tokens_by_odds_total",
        "Draft tokens that were verified, by the odds that they would be accepted.",
        _ranges("calibration", COUNT, ODDS_STARTS),
        "odds",
        ODDS,
    ),
    Counter(
        "ssd_drafter_promised_tokens_by_odds_total",
        "Draft tokens that should have been accepted, the sum of their odds, by these odds.",
        _ranges("calibration", PROMISED, ODDS_STARTS),
        "odds",
        ODDS,
    ),
    Counter(
        "ssd_drafter_accepted_tokens_by_odds_total",
        "Draft tokens that were accepted, by the odds that they would be.",
        _ranges("calibration", KEPT_COUNT, ODDS_STARTS),
        "odds",
        ODDS,
    ),
    Counter(
        "ssd_drafter_appended_tokens_total",
        "Tokens learned, those that were forgotten since included.",
        lambda facts: facts.corpus.appended_tokens,
    ),
    Counter(
        "ssd_drafter_forgotten_requests_total",
        "Requests forgotten when asked to, pieces of long ones each.",
        lambda facts: facts.corpus.forgotten,
    ),
    Counter(
        "ssd_drafter_duplicate_texts_total",
        "Texts that were offered again after they had been learned.",
        lambda facts: facts.duplicates,
    ),
    Counter(
        "ssd_drafter_merges_total", "Times that finished requests became draftable.", lambda facts: facts.corpus.merges
    ),
    Counter(
        "ssd_drafter_base_merges_total",
        "Times that recent text was merged into the large order.",
        lambda facts: facts.corpus.base_merges,
    ),
    Counter(
        "ssd_drafter_full_builds_total",
        "Times that the whole corpus was sorted anew.",
        lambda facts: facts.corpus.full_builds,
    ),
    Counter(
        "ssd_drafter_client_timeouts_total",
        "Steps that clients took without drafts since the answer was late.",
        lambda facts: facts.clients.timeouts,
    ),
    Counter(
        "ssd_drafter_client_dropped_answers_total",
        "Answers that clients dropped since they came too late.",
        lambda facts: facts.clients.dropped,
    ),
    Counter(
        "ssd_drafter_client_resyncs_total",
        "Sequences that clients told again since the service had lost them.",
        lambda facts: facts.clients.resyncs,
    ),
    Counter(
        "ssd_drafter_client_reconnects_total",
        "Connections that clients made again.",
        lambda facts: facts.clients.reconnects,
    ),
    Histogram(
        "ssd_drafter_draft_latency_seconds",
        "Seconds to answer one message, its whole batch, in the service.",
        lambda facts: facts.draft_latency,
    ),
    Histogram(
        "ssd_drafter_merge_latency_seconds",
        "Seconds to make finished requests draftable, refreshes that did something.",
        lambda facts: facts.merge_latency,
    ),
)

GAUGES: tuple[Gauge, ...] = (
    Gauge(
        "ssd_drafter_corpus_tokens",
        "Tokens remembered now, separators included.",
        lambda facts: facts.corpus.tokens,
    ),
    Gauge("ssd_drafter_corpus_capacity_tokens", "Tokens that can be remembered.", lambda facts: facts.corpus.capacity),
    Gauge(
        "ssd_drafter_corpus_requests",
        "Requests remembered now, pieces of long ones each.",
        lambda facts: facts.corpus.requests,
    ),
    Gauge(
        "ssd_drafter_waiting_tokens", "Tokens learned but not draftable yet.", lambda facts: facts.corpus.waiting_tokens
    ),
    Gauge("ssd_drafter_memory_bytes", "Bytes of memory of the namespace.", lambda facts: facts.memory_bytes),
    Gauge("ssd_drafter_streams", "Streams that draft from it now.", lambda facts: facts.streams),
    Gauge("ssd_drafter_sequences", "Sequences that run now.", lambda facts: facts.sequences),
)
