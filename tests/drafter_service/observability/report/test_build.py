"""Values of a report, compared with ones computed by hand."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.observability.facts import (
    BOUNDS_S,
    Engine,
    History,
    Latency,
    Sample,
)
from drafter_service.observability.report.build import MAX_PERIODS, build_report
from drafter_service.observability.report.schema import ClientTotals, Report, SharedLogReport
from ssd.stats import Stats, VersionTotals
from ssd.types import Source
from tests.drafter_service.observability.report.samples import (
    HOUR,
    NOW,
    busy_namespace,
    corpus_of,
    engine_use,
    new_namespace,
    service,
)
from tests.strategies import examples


def report_of(*namespaces, **changes):
    return build_report(service(*namespaces, **changes))


def only(**changes):
    """Return the report of one namespace with these facts."""
    return report_of(new_namespace(**changes)).namespaces[0]


def counted(steps=(0, 0, 0), **tables):
    """Return counters; `tables` give rows by index."""
    stats = Stats()
    stats.counters.steps[:] = steps
    for name, rows in tables.items():
        for index, row in rows.items():
            getattr(stats.counters, name)[index] = row
    return stats


def at(time, steps=0, committed=0, hits=0, drafted=0, accepted=0, corpus=0, appended=0, timeouts=0):
    return Sample(time, steps, committed, hits, drafted, accepted, corpus, appended, 1000, timeouts)


def test_engines_are_told_apart():
    vllm = engine_use(2, 100, 250, engine_steps=40, late_steps=3, offered=300)
    vllm.stats.counters.by_source[0] = 200, 150
    first, second = only(uses={Engine("a", ""): engine_use(1), Engine("vllm/1", "node:1"): vllm}).by_client
    assert (first.client, first.engine, first.streams, first.tokens_per_step) == ("vllm/1", "node:1", 2, 2.5)
    assert (first.offered, first.drafted, first.accepted, first.acceptance) == (300, 200, 150, 0.75)
    assert (first.engine_steps, first.late_steps, first.late_share) == (40, 3, 0.075)
    assert (second.client, second.engine, second.tokens_per_step, second.late_share) == ("a", "", None, None)


def test_versions_are_told_apart():
    stats = Stats()
    stats.record_version(4, VersionTotals(2, 100, 250, 200, 150, ended_at=1.0))
    stats.record_version(3, VersionTotals(1, 2, 2, ended_at=2.0))
    third, fourth = only(stats=stats).by_version
    assert (third.version, third.requests, third.tokens_per_step, third.acceptance) == (3, 1, 1.0, None)
    assert (fourth.version, fourth.requests, fourth.steps, fourth.committed) == (4, 2, 100, 250)
    assert (fourth.drafted, fourth.accepted, fourth.tokens_per_step, fourth.acceptance) == (200, 150, 2.5, 0.75)
    assert only().by_version is None


def test_ratios_follow_from_totals():
    drafting = only(
        stats=counted((100, 240, 80), by_source={Source.CORPUS: (150, 110), Source.LOCAL: (50, 30)})
    ).drafting
    assert (drafting.steps, drafting.committed, drafting.drafted, drafting.accepted) == (100, 240, 200, 140)
    assert drafting.hit_rate == 0.8
    assert drafting.acceptance == 0.7
    assert drafting.tokens_per_step == 2.4
    assert drafting.drafted_per_step == 2.0
    assert drafting.saved_steps == 140
    assert drafting.saved_share == pytest.approx(140 / 240)
    assert drafting.break_even_cost == pytest.approx(0.7)
    # At the break-even cost the speed-up is 1.
    assert drafting.tokens_per_step / (1 + drafting.break_even_cost * drafting.drafted_per_step) == pytest.approx(1.0)


def test_ratios_of_a_new_service_are_null():
    report = report_of()
    assert report.namespaces == []
    drafting = only().drafting
    assert drafting.steps == drafting.saved_steps == 0
    for field in ("hit_rate", "acceptance", "tokens_per_step", "saved_share", "break_even_cost"):
        assert getattr(drafting, field) is None


def test_tables_contain_the_counters():
    stats = counted(
        (10, 30, 8),
        by_source={Source.LOCAL: (10, 7)},
        by_position={0: (8, 6), 1: (2, 1)},
        by_age={0: (1, 1), 4: (4, 3), 39: (5, 3)},
        calibration={0: (4, 0.1, 1), 19: (6, 5.9, 6)},
    )
    known = only(stats=stats)
    assert [(one.position, one.drafted, one.acceptance) for one in known.by_position] == [(1, 8, 0.75), (2, 2, 0.5)]
    assert [one.accepted_share_of_drafts for one in known.by_position] == [0.75, 0.125]
    assert [(one.source, one.drafted, one.accepted) for one in known.by_source] == [
        ("corpus", 0, 0),
        ("local", 10, 7),
        ("fallback", 0, 0),
    ]
    spans = [(one.least_tokens, one.most_tokens) for one in known.age.bins]
    assert spans[:6] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31)]
    assert spans[-1] == (1 << 38, None)
    # The 4th of 7 accepted tokens is 8 to 15 tokens old.
    assert known.age.median_tokens == 15
    low, high = known.calibration.bins
    assert (low.least_path_prob, low.most_path_prob, low.drafted, low.predicted, low.acceptance) == (
        0.0,
        0.05,
        4,
        0.025,
        0.25,
    )
    assert (high.least_path_prob, high.acceptance) == (0.95, 1.0)
    assert known.calibration.error == pytest.approx((0.9 + 0.1) / 10)


def test_periods_are_differences_of_samples():
    history = History()
    history.record(at(NOW - 30, steps=10, committed=10))
    history.record(
        at(NOW - 20, steps=30, committed=50, hits=10, drafted=40, accepted=20, corpus=500, appended=700, timeouts=2)
    )
    history.record(
        at(NOW - 10, steps=30, committed=50, hits=10, drafted=40, accepted=20, corpus=500, appended=700, timeouts=2)
    )
    stats = counted((40, 90, 18), by_source={0: (60, 50)})
    corpus = corpus_of(1000, 600, 3, 900)
    known = only(history=history, stats=stats, corpus=corpus, clients=ClientTotals(timeouts=3), memory_bytes=7)
    busy, quiet, now = known.over_time
    assert (busy.begins_at, busy.ends_at) == (NOW - 30, NOW - 20)
    assert (busy.steps, busy.committed, busy.hit_rate, busy.acceptance, busy.tokens_per_step) == (20, 40, 0.5, 0.5, 2.0)
    assert (busy.timeouts, busy.learned_tokens, busy.corpus_tokens) == (2, 700, 500)
    assert (quiet.steps, quiet.tokens_per_step, quiet.hit_rate, quiet.acceptance) == (0, None, None, None)
    # The last period ends with the current totals.
    assert (now.ends_at, now.steps, now.committed, now.drafted, now.accepted) == (NOW, 10, 40, 20, 30)
    assert (now.timeouts, now.learned_tokens, now.corpus_tokens, now.memory_bytes) == (1, 200, 600, 7)


def test_many_samples_become_few_periods_with_the_same_sums():
    facts = busy_namespace()
    known, first = report_of(facts).namespaces[0], facts.history.samples[0]
    assert MAX_PERIODS / 2 < len(known.over_time) <= MAX_PERIODS
    for before, after in pairwise(known.over_time):
        assert before.ends_at == after.begins_at
    for field in ("steps", "committed", "drafted", "accepted"):
        grown = getattr(known.drafting, field) - getattr(first, field)
        assert sum(getattr(period, field) for period in known.over_time) == grown
    assert known.over_time[-1].ends_at == NOW


def test_recent_is_the_last_hour():
    history = History()
    history.record(at(NOW - 3 * HOUR))
    history.record(at(NOW - HOUR, steps=100, committed=100, appended=1000))
    history.record(at(NOW - HOUR / 2, steps=101, committed=105, appended=1000))
    known = only(
        history=history,
        stats=counted((110, 136, 5)),
        corpus=corpus_of(72_000, 600, 3, 8200),
    )
    assert known.recent.seconds == HOUR
    assert known.recent.drafting.steps == 10
    assert known.recent.drafting.tokens_per_step == 3.6
    assert known.recent.output_tokens_per_s == pytest.approx(0.01)
    assert known.recent.learned_tokens_per_s == pytest.approx(2.0)
    assert known.corpus.turnover_s == pytest.approx(36_000)
    assert known.corpus.turnovers == pytest.approx(8200 / 72_000)
    assert known.corpus.occupancy == pytest.approx(600 / 72_000)


def test_reset_counters_make_no_negative_periods():
    history = History()
    history.record(at(NOW - 20, steps=1000, committed=3000, hits=900, drafted=5000, accepted=2000))
    known = only(history=history, stats=counted((5, 6, 1)))
    assert (known.over_time[0].steps, known.over_time[0].committed, known.over_time[0].tokens_per_step) == (0, 0, None)


def test_a_clock_that_was_set_back_removes_only_the_periods():
    history = History()
    history.record(at(NOW - 20, steps=1))
    known = report_of(new_namespace(history=history, stats=counted((5, 10, 1))), now=-5.0).namespaces[0]
    assert known.drafting.tokens_per_step == 2
    assert known.over_time == []


def test_latencies_have_quantiles_and_bins():
    latency = Latency()
    for _ in range(99):
        latency.record(0.001)
    latency.record(0.5)
    known = only(draft_latency=latency).draft_latency
    bound = next(bound for bound in BOUNDS_S if bound >= 0.001)
    assert (known.count, known.longest_s) == (100, 0.5)
    assert known.p50_s == known.p90_s == known.p99_s == bound
    assert known.mean_s == pytest.approx((99 * 0.001 + 0.5) / 100)
    assert known.bins[0].count == 99
    assert known.bins[0].least_s < 0.001 <= known.bins[0].most_s == bound
    assert known.bins[-1].count == 1
    assert sum(one.count for one in known.bins) == 100
    unknown = only().draft_latency
    assert (unknown.count, unknown.p50_s, unknown.longest_s, unknown.bins) == (0, None, None, [])


def test_total_sums_all_namespaces():
    report = report_of(
        new_namespace("b", stats=counted((10, 20, 5), by_source={0: (10, 5)})),
        new_namespace("a", stats=counted((30, 120, 15), by_source={0: (70, 35)})),
    )
    assert [namespace.name for namespace in report.namespaces] == ["a", "b"]
    assert (report.total.steps, report.total.committed, report.total.tokens_per_step) == (40, 140, 3.5)
    assert (report.total.hit_rate, report.total.acceptance) == (0.5, 0.5)


def test_report_contains_the_other_facts():
    facts = service(busy_namespace(), log=SharedLogReport(is_connected=True, dropped_tokens=9))
    report = build_report(facts)
    known = report.namespaces[0]
    assert report.service.uptime_s == 36 * HOUR
    assert report.service.log.dropped_tokens == 9
    assert known.model.vocab_size == 128_256
    assert (known.streams, known.sequences, known.duplicates) == (4, 212, 31)
    assert known.clients == facts.namespaces[0].clients


counts = st.one_of(st.integers(0, 9), st.integers(0, 2**62))
odd_floats = st.one_of(st.floats(), st.floats(0, 1e6))


@st.composite
def any_stats(draw):
    """Generate counters that no drafter produces, such as those of a damaged file."""
    stats = Stats()
    for table in stats.counters:
        values = odd_floats if table.dtype == np.float64 else st.one_of(counts, st.integers(-5, 0))
        for index in draw(st.lists(st.integers(0, table.size - 1), max_size=6)):
            table.ravel()[index] = draw(values)
    return stats


@st.composite
def any_namespace(draw):
    history = History()
    for sample in draw(st.lists(st.builds(Sample, odd_floats, *[counts] * 9), max_size=6)):
        history.record(sample)
    latency = Latency()
    for seconds in draw(st.lists(st.floats(0, 1e6), max_size=5)):
        latency.record(seconds)
    return new_namespace(
        draw(st.text()),
        stats=draw(any_stats()),
        history=history,
        corpus=corpus_of(*[draw(counts) for _ in range(4)]),
        draft_latency=latency,
    )


@examples(60)
@given(namespaces=st.lists(any_namespace(), max_size=2), now=st.floats(0, 1e11))
def test_any_counters_make_a_valid_document(namespaces, now):
    report = build_report(replace(service(), namespaces=tuple(namespaces), now=now))
    document = report.model_dump_json()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    parsed = json.loads(document, parse_constant=refuse)
    assert Report.model_validate(parsed) == report
    assert all(math.isfinite(number) for number in numbers_in(parsed))


def numbers_in(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from numbers_in(one)
    elif isinstance(value, int | float):
        yield value
