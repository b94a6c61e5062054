"""Values of a report, compared with ones computed by hand."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.observability.facts import BOUNDS_S, Engine, History, Sample
from drafter_service.observability.report.build import MAX_PERIODS, build_report
from drafter_service.observability.report.schema import ClientTotals, Report, SharedLogReport
from ssd.stats import Stats, VersionTotals
from ssd.types import Source
from tests.drafter_service.observability.report.samples import (
    HOUR,
    NOW,
    busy_namespace,
    corpus_of,
    durations,
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


def history_of(*samples):
    history = History()
    for sample in samples:
        history.record(sample)
    return history


def at(time, steps=0, committed=0, hits=0, drafted=0, accepted=0, corpus=0, appended=0, timeouts=0):
    return Sample(time, steps, committed, hits, drafted, accepted, corpus, appended, 1000, timeouts)


def fields(part, names):
    """Return fields of a part of a report; names: separated by spaces."""
    return tuple(getattr(part, name) for name in names.split())


STEPS = "tokens_per_step acceptance steps committed drafted accepted"


def test_engines_are_told_apart():
    vllm = engine_use(2, 100, 250, engine_steps=40, late_steps=3, offered=300)
    vllm.stats.counters.by_source[0] = 200, 150
    first, second = only(uses={Engine("a", ""): engine_use(1), Engine("vllm/1", "node:1"): vllm}).by_client
    names = "client engine streams offered engine_steps late_steps late_share"
    assert fields(first, names) == ("vllm/1", "node:1", 2, 300, 40, 3, 0.075)
    assert fields(first, STEPS) == (2.5, 0.75, 100, 250, 200, 150)
    assert fields(second, names) == ("a", "", 1, 0, 0, 0, None)
    assert second.tokens_per_step is None


def test_versions_are_told_apart():
    stats = Stats()
    stats.record_version(4, VersionTotals(2, 100, 250, 200, 150, ended_at=1.0))
    stats.record_version(3, VersionTotals(1, 2, 2, ended_at=2.0))
    third, fourth = only(stats=stats).by_version
    assert fields(third, "version requests " + STEPS) == (3, 1, 1.0, None, 2, 2, 0, 0)
    assert fields(fourth, "version requests " + STEPS) == (4, 2, 2.5, 0.75, 100, 250, 200, 150)
    assert only().by_version is None


def test_ratios_follow_from_totals_and_are_null_without_any():
    drafting = only(
        stats=counted((100, 240, 80), by_source={Source.CORPUS: (150, 110), Source.LOCAL: (50, 30)})
    ).drafting
    assert fields(drafting, STEPS) == (2.4, 0.7, 100, 240, 200, 140)
    ratios = "hit_rate drafted_per_step saved_share break_even_cost"
    assert fields(drafting, ratios) == (0.8, 2.0, pytest.approx(140 / 240), pytest.approx(0.7))
    assert drafting.saved_steps == 140
    # At the break-even cost the speed-up is 1.
    assert drafting.tokens_per_step / (1 + drafting.break_even_cost * drafting.drafted_per_step) == pytest.approx(1.0)
    assert report_of().namespaces == []
    new = only().drafting
    assert new.steps == new.saved_steps == 0
    assert {*fields(new, f"acceptance tokens_per_step {ratios}")} == {None}


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
    by_source = [fields(one, "source drafted accepted") for one in known.by_source]
    assert by_source == [("corpus", 0, 0), ("local", 10, 7), ("fallback", 0, 0)]
    spans = [(one.least_tokens, one.most_tokens) for one in known.age.bins]
    assert spans[:6] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31)]
    assert spans[-1] == (1 << 38, None)
    # The 4th of 7 accepted tokens is 8 to 15 tokens old.
    assert known.age.median_tokens == 15
    low, high = known.calibration.bins
    assert fields(low, "least_path_prob most_path_prob drafted predicted acceptance") == (0.0, 0.05, 4, 0.025, 0.25)
    assert (high.least_path_prob, high.acceptance) == (0.95, 1.0)
    assert known.calibration.error == pytest.approx((0.9 + 0.1) / 10)


def test_periods_are_differences_of_samples():
    totals = {"steps": 30, "committed": 50, "hits": 10, "drafted": 40, "accepted": 20, "corpus": 500, "appended": 700}
    samples = (
        at(NOW - 30, steps=10, committed=10),
        at(NOW - 20, **totals, timeouts=2),
        at(NOW - 10, **totals, timeouts=2),
    )
    busy, quiet, now = only(
        history=history_of(*samples),
        stats=counted((40, 90, 18), by_source={0: (60, 50)}),
        corpus=corpus_of(1000, 600, 3, 900),
        clients=ClientTotals(timeouts=3),
        memory_bytes=7,
    ).over_time
    names = "begins_at ends_at hits timeouts learned_tokens corpus_tokens memory_bytes"
    assert fields(busy, names) == (NOW - 30, NOW - 20, 10, 2, 700, 500, 1000)
    assert fields(busy, STEPS) == (2.0, 0.5, 20, 40, 40, 20)
    assert fields(quiet, f"hit_rate {STEPS}") == (None, None, None, 0, 0, 0, 0)
    # The last period ends with the current totals.
    assert fields(now, names) == (NOW - 10, NOW, 8, 1, 200, 600, 7)
    assert fields(now, "steps committed drafted accepted") == (10, 40, 20, 30)


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
    samples = (
        at(NOW - 3 * HOUR),
        at(NOW - HOUR, steps=100, committed=100, appended=1000),
        at(NOW - HOUR / 2, steps=101, committed=105, appended=1000),
    )
    stats, corpus = counted((110, 136, 5)), corpus_of(72_000, 600, 3, 8200)
    known = only(history=history_of(*samples), stats=stats, corpus=corpus)
    recent = known.recent
    assert (recent.seconds, recent.drafting.steps, recent.drafting.tokens_per_step) == (HOUR, 10, 3.6)
    assert fields(recent, "output_tokens_per_s learned_tokens_per_s") == (pytest.approx(0.01), pytest.approx(2.0))
    expected = (36_000, 8200 / 72_000, 600 / 72_000)
    assert fields(known.corpus, "turnover_s turnovers occupancy") == pytest.approx(expected)


def test_recent_begins_after_a_time_in_which_the_service_did_not_run():
    before, after = at(NOW - 3 * HOUR), at(NOW - HOUR / 6, steps=100, committed=100)
    for samples, seconds in (([before, after], HOUR / 6), ([before], None)):
        recent = only(history=history_of(*samples), stats=counted((110, 136, 5))).recent
        assert (recent and recent.seconds) == seconds


def test_counters_and_clocks_that_were_set_back_make_no_negative_periods():
    history = history_of(at(NOW - 20, steps=1000, committed=3000, hits=900, drafted=5000, accepted=2000))
    stats = counted((5, 10, 1))
    [period] = only(history=history, stats=stats).over_time
    assert fields(period, "tokens_per_step steps committed drafted") == (None, 0, 0, 0)
    known = report_of(new_namespace(history=history, stats=stats), now=-5.0).namespaces[0]
    assert (known.drafting.tokens_per_step, known.over_time) == (2, [])


def test_latencies_have_quantiles_and_bins():
    known = only(draft_latency=durations(*[0.001] * 99, 0.5)).draft_latency
    bound = next(bound for bound in BOUNDS_S if bound >= 0.001)
    mean = pytest.approx((99 * 0.001 + 0.5) / 100)
    assert fields(known, "count longest_s mean_s p50_s p90_s p99_s") == (100, 0.5, mean, bound, bound, bound)
    assert [one.count for one in known.bins if one.count] == [99, 1]
    assert known.bins[0].least_s < 0.001 <= known.bins[0].most_s == bound
    assert known.bins[-1].count == 1
    unknown = only().draft_latency
    assert fields(unknown, "count p50_s longest_s bins") == (0, None, None, [])


def test_total_sums_all_namespaces():
    report = report_of(
        new_namespace("b", stats=counted((10, 20, 5), by_source={0: (10, 5)})),
        new_namespace("a", stats=counted((30, 120, 15), by_source={0: (70, 35)})),
    )
    assert [namespace.name for namespace in report.namespaces] == ["a", "b"]
    assert fields(report.total, f"hit_rate {STEPS}") == (0.5, 3.5, 0.5, 40, 140, 80, 40)


def test_report_contains_the_other_facts():
    facts = service(busy_namespace(), log=SharedLogReport(is_connected=True, dropped_tokens=9))
    report = build_report(facts)
    known = report.namespaces[0]
    assert report.service.uptime_s == 36 * HOUR
    assert report.service.log.dropped_tokens == 9
    assert (known.model.vocab_size, known.clients) == (128_256, facts.namespaces[0].clients)
    assert fields(known, "streams sequences duplicates") == (4, 212, 31)


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
    return new_namespace(
        draw(st.text()),
        stats=draw(any_stats()),
        history=history_of(*draw(st.lists(st.builds(Sample, odd_floats, *[counts] * 9), max_size=6))),
        corpus=corpus_of(*[draw(counts) for _ in range(4)]),
        draft_latency=durations(*draw(st.lists(st.floats(0, 1e6), max_size=5))),
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
