"""What the page shows of one namespace."""

from __future__ import annotations

from drafter_service.observability.report import curves, plots, units, upkeep
from drafter_service.observability.report.parts import Figure, cells_of, key_of, panel, table_of
from drafter_service.observability.report.plots import Bar
from drafter_service.observability.report.schema import NamespaceReport, Tally

OPEN_POSITION, OPEN_MATCH_LENGTH = 129, 64
"""They stand for everything from there on."""
TALLY_HEADS = ("acceptance", "draft tokens", "accepted")


def panels(namespace: NamespaceReport) -> list[str]:
    """All panels of which something is known, each a heading, a plot, and the same as a table."""
    makers = (
        _over_time,
        _positions,
        _lengths,
        _ages,
        _calibration,
        _sources,
        _worth,
        upkeep.latencies,
        upkeep.occupancy,
        upkeep.corpus,
        upkeep.engines,
        _passages,
    )
    return [shown for maker in makers for shown in maker(namespace)]


def _over_time(namespace: NamespaceReport) -> list[str]:
    periods = namespace.over_time or []
    if not any(period.tokens_per_step is not None for period in periods):
        return []
    key = (("var(--with)", "tokens per step"), ("var(--new)", "hit rate"), ("var(--near)", "acceptance"))
    rows = [
        (
            units.moment(period.begins_at),
            Figure(period.tokens_per_step, units.ratio),
            Figure(period.hit_rate, units.share),
            Figure(period.acceptance, units.share),
            Figure(period.committed, units.count),
            Figure(period.timeouts, units.count),
        )
        for period in periods
    ]
    heads = ("from", "tokens per step", "hit rate", "acceptance", "output tokens", "late steps")
    plot = curves.drafting_over_time(periods) + key_of(key)
    note = "The shaded area is what drafts add to plain decoding."
    return [panel("Over time", note, plot, heads, rows, "across")]


def _positions(namespace: NamespaceReport) -> list[str]:
    tallies = namespace.by_position
    if not tallies:
        return []
    bars, rows = [], []
    for tally in tallies:
        name = _open_name(tally.position, OPEN_POSITION)
        bars.append(Bar(name, f"position {name}", tally.acceptance, tally.drafted))
        rows.append((name, Figure(tally.accepted_share_of_drafts, units.share), *cells_of(tally)))
    plot = plots.shares(bars, "Acceptance by position in the draft", 12)
    heads = ("position", "right up to here", *TALLY_HEADS)
    return [panel("By position in the draft", "Accepted of those verified there.", plot, heads, rows)]


def _lengths(namespace: NamespaceReport) -> list[str]:
    tallies = {tally.match_length: tally for tally in namespace.by_match_length}
    if not tallies:
        return []
    bars, rows = [], []
    for length in range(max(tallies) + 1):
        name = _open_name(length, OPEN_MATCH_LENGTH)
        tally = tallies.get(length, Tally(drafted=0, accepted=0, acceptance=None))
        bars.append(Bar(name, f"{name} tokens matched", tally.acceptance, tally.drafted))
        if length in tallies:
            rows.append((name, *cells_of(tally)))
    plot = plots.shares(bars, "Acceptance by match length", 9)
    note = "How many of the context's last tokens were found again."
    return [panel("By match length", note, plot, ("tokens", *TALLY_HEADS), rows)]


def _ages(namespace: NamespaceReport) -> list[str]:
    age = namespace.age
    if not age.bins:
        return []
    bars, rows = [], []
    for tally in age.bins:
        name = units.span(tally.least_tokens, tally.most_tokens)
        bars.append(Bar(units.count(tally.least_tokens), f"{name} tokens old", tally.acceptance, tally.drafted))
        rows.append((name, *cells_of(tally)))
    note = f"Half of what was accepted is at most {units.count(age.median_tokens)} tokens old."
    plot = plots.shares(bars, "Acceptance by age of the text", 6)
    return [panel("By age of the text", note, plot, ("tokens since", *TALLY_HEADS), rows)]


def _calibration(namespace: NamespaceReport) -> list[str]:
    known = namespace.calibration
    if not known.bins:
        return []
    rows = [
        (
            units.percents(one.least_odds, one.most_odds),
            Figure(one.promised, units.share),
            Figure(one.kept, units.share),
            Figure(one.drafted, units.count),
        )
        for one in known.bins
    ]
    note = f"Odds promised (across) and kept (up): {units.share(known.error)} apart on average."
    plot = plots.calibration(known)
    return [panel("Calibration", note, plot, ("odds", "promised", "kept", "draft tokens"), rows)]


def _sources(namespace: NamespaceReport) -> list[str]:
    tallies = namespace.by_source
    if not namespace.drafting.drafted:
        return []
    names = {
        "corpus": ("var(--corpus)", "corpus: other requests"),
        "local": ("var(--near)", "local: the request itself"),
    }
    key = [
        (tone, f"{name}, {units.share(tally.acceptance)} accepted")
        for tally in tallies
        for tone, name in [names[tally.source]]
    ]
    rows = [(tally.source, *cells_of(tally)) for tally in tallies]
    plot = plots.sources(tallies) + key_of(key)
    heads = ("source", *TALLY_HEADS)
    return [panel("By source", "Where draft tokens were found.", plot, heads, rows)]


def _worth(namespace: NamespaceReport) -> list[str]:
    drafting = namespace.drafting
    if not drafting.drafted:
        return []
    rows = [
        (f"{100 * estimate.cost:g}% of a step", Figure(estimate.speedup, lambda value: f"{units.ratio(value)}x"))
        for estimate in drafting.estimates
    ]
    table = table_of(("verifying a token costs", "speed"), rows)
    note = (
        f"{units.ratio(drafting.drafted_per_step)} draft tokens are verified a step. "
        f"They pay while one costs less than {units.share(drafting.break_even_cost)} of a step."
    )
    return [panel("What that is worth", note, table)]


def _passages(namespace: NamespaceReport) -> list[str]:
    if namespace.passages is None:
        return []
    rows = [
        (
            Figure(passage.accepted, units.count),
            Figure(passage.age_tokens, units.count),
            " ".join(map(str, passage.tokens)) if passage.text is None else passage.text,
        )
        for passage in namespace.passages
    ]
    table = table_of(("accepted", "tokens since", "passage"), rows)
    return [panel("Most productive passages", "This is text of users.", table, kind="across words")]


def _open_name(number: int, most: int) -> str:
    """`most` stands for everything from there on."""
    return f"{number}+" if number == most else str(number)
