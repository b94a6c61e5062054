"""Reports in the terminal: a sentence about each namespace first, at most 80 columns."""

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from drafter_service.observability.facts import Engine
from drafter_service.observability.pages import units
from drafter_service.observability.report.build import build_report
from drafter_service.observability.report.page import render_page
from drafter_service.observability.report.schema import Drafting, SharedLogReport
from drafter_service.observability.report.terminal import print_report
from drafter_service.observability.report.verdict import NOTHING, saving
from ssd.stats import Stats
from tests.drafter_service.observability.report.samples import (
    SERVICES,
    busy_namespace,
    engine_use,
    new_namespace,
    service,
)


def printed(report, width=80):
    text = io.StringIO()
    print_report(report, Console(file=text, width=width))
    return text.getvalue()


@pytest.mark.parametrize("name", SERVICES)
def test_output_fits_80_columns(name):
    text = printed(build_report(SERVICES[name]()))
    assert max(cell_len(line) for line in text.split("\n")) <= 80
    assert "\x1b" not in text
    assert "nan" not in text.lower().split()


def test_output_starts_with_one_sentence_per_namespace():
    report = build_report(service(busy_namespace("small", steps=2000), busy_namespace("large"), new_namespace("idle")))
    _, body = printed(report).split("\n\n", 1)
    sentences = [line for line in body.split("\n") if not line.startswith(" ")]
    large = next(namespace for namespace in report.namespaces if namespace.name == "large").drafting
    assert sentences[0] == (
        f"large saves {units.share(large.saved_share)} of the target's steps: "
        f"{units.ratio(large.tokens_per_step)} tokens per step instead of 1."
    )
    assert sentences[1].startswith("small saves ")
    late = Drafting(**large.model_dump(exclude={"drafted"}), drafted=0)
    assert saving(late) == sentences[0].removeprefix("large ")  # Engines count draft tokens later, or never.
    assert sentences[2] == "idle has not received a request for drafts yet."


def test_a_report_without_namespaces_says_where_they_may_be():
    """The service may have loaded none since its start, or only others' namespaces."""
    text = " ".join(printed(report := build_report(service())).split())
    for sentence in NOTHING:
        assert sentence in text
        assert sentence in render_page(report)
    assert "in memory" in text
    assert "`ssd-drafter namespaces`" in text


def test_values_are_those_of_the_report():
    report = build_report(service(busy_namespace()))
    text, known = printed(report), report.namespaces[0]
    words = " ".join(text.split())
    assert f"tokens per step {units.ratio(known.drafting.tokens_per_step)}" in words
    assert f"hit rate {units.share(known.drafting.hit_rate)} {units.share(known.recent.drafting.hit_rate)}" in words
    assert f"differ by {units.share(known.calibration.error)} on average" in words
    draft = known.draft_latency
    assert f"p50 {units.duration(draft.p50_s)}, p90 {units.duration(draft.p90_s)}" in words
    assert "12345 77 " in words
    assert f"{units.span(5, 8)} 90 30.0 ms 24.0 ms > 8,192 4 1.50 s 1.00 s" in words
    first = known.by_position[0]
    line = next(line for line in text.split("\n") if line.startswith(" 1 "))
    assert line.split()[1:3] == [units.share(first.acceptance), units.count(first.drafted)]


def test_many_namespaces_are_an_overview():
    facts = service(*(busy_namespace(f"team-{n}", steps=1000 * (n + 1)) for n in range(8)))
    text = printed(build_report(facts))
    assert "--namespace" in text
    assert "By age of the text" not in text
    rows = [line.split()[0] for line in text.split("\n") if line.startswith(" team-")]
    assert rows == [f"team-{n}" for n in reversed(range(8))]


def test_remarks_report_problems():
    late = {Engine("vllm/1", name): engine_use(1, 9, 9, 10_000, steps) for name, steps in (("a", 250), ("b", 100))}
    busy = busy_namespace(uses=late)
    table = busy.stats.counters.calibration
    table[:, 2] = 0.5 * table[:, 2]
    text = " ".join(printed(build_report(service(busy, log=SharedLogReport(is_connected=False)))).split())
    assert "a: 2.5% of its steps (250) had no drafts because the answer was late. Raise its deadline_s" in text
    assert "b: " not in text, "1 % is not more than 1 %"
    assert "The shared log cannot be reached" in text
    assert "Acceptance probabilities are off by" in text
    missed = service(busy_namespace(), log=SharedLogReport(is_connected=True, gaps=1, dropped_tokens=5, lag_s=60))
    text = " ".join(printed(build_report(missed)).split())
    for remark in (
        "were trimmed before this sidecar read them",
        "reads the shared log 60.0 s late",
        "never written to the shared log: 5.",
    ):
        assert remark in text
    slow = busy_namespace()
    slow = replace(slow, corpus=slow.corpus.model_copy(update={"dropped_requests": 7}))
    damaged = replace(service(slow), log=None, set_aside={"a": ["corpus.refused", "namespace.refused"]})
    text = " ".join(printed(build_report(damaged)).split())
    assert "Damaged files of a were set aside: corpus.refused, namespace.refused. Restore a backup" in text
    assert "7 requests were not learned. Give the drafter more" in text
    calm = replace(service(busy_namespace()), log=None)
    assert "!" not in printed(build_report(calm))


def test_shadow_mode_is_a_sentence():
    stats = Stats()
    assert "shadow" not in printed(build_report(service(new_namespace(shadow=stats))))
    stats.record_path(1000, 700, 600, steps=400)
    report = build_report(service(new_namespace(shadow=stats)))
    sentence = "shadow: over 1,000 tokens, drafts would have given 2.50 tokens per step (acceptance 86%)."
    assert sentence in " ".join(printed(report).split())
    assert sentence in render_page(report)
