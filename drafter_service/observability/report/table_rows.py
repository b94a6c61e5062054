"""Rows of a report's tables, as the terminal and the page show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from drafter_service.observability.pages.tables import Value
from drafter_service.observability.report import units
from drafter_service.observability.report.figures import share
from drafter_service.observability.report.schema import (
    BudgetReport,
    LatencyReport,
    NamespaceReport,
    Tally,
    VersionReport,
)
from ssd.budget.totals import SIZES
from ssd.stats import POSITIONS

STEP_HEADS = ("tokens of a step", "steps", "mean duration", "expected")
VERSION_HEADS = ("version", "rollouts", "tokens", "per step", "draft tokens", "accepted", "acceptance")
QUANTILES = ("p50", "p90", "p99", "longest")


class Row(NamedTuple):
    """Draft tokens with similar positions or ages."""

    least: int
    most: int | None
    """None: no upper bound."""
    tally: Tally

    @property
    def label(self) -> str:
        """The range as text."""
        return units.span(self.least, self.most)

    @property
    def start(self) -> str:
        """The beginning of the range as text."""
        return units.span(self.least, None if self.most is None else self.least)


def positions(namespace: NamespaceReport) -> list[Row]:
    """Return draft tokens by position in the draft."""
    return [_row(tally.position, POSITIONS, tally) for tally in namespace.by_position]


def ages(namespace: NamespaceReport) -> list[Row]:
    """Return draft tokens by age of the text, in tokens."""
    return [Row(tally.least_tokens, tally.most_tokens, tally) for tally in namespace.age.bins]


def _row(number: int, last: int, tally: Tally) -> Row:
    """Return the row of one number; `last` stands for all larger ones, too."""
    return Row(number, None if number == last else number, tally)


def grouped(rows: Iterable[Row], firsts: Sequence[int]) -> list[Row]:
    """Return sums over groups of rows, by the first value of each group, without empty groups."""
    groups = []
    for first, following in zip(firsts, (*firsts[1:], None), strict=True):
        members = [row.tally for row in rows if first <= row.least and (following is None or row.least < following)]
        drafted, accepted = sum(tally.drafted for tally in members), sum(tally.accepted for tally in members)
        if drafted:
            tally = Tally(drafted=drafted, accepted=accepted, acceptance=share(accepted, drafted))
            groups.append(Row(first, None if following is None else following - 1, tally))
    return groups


def corpus(namespace: NamespaceReport) -> list[tuple[str, Value]]:
    """Return the facts of the corpus; those that are not known are left out."""
    known = namespace.corpus
    rows = (
        ("tokens remembered", Value(known.tokens, units.count)),
        ("requests remembered", Value(known.requests, units.count)),
        ("capacity, tokens", Value(known.capacity_tokens, units.count)),
        ("full", Value(known.occupancy, units.share)),
        ("tokens learned in total", Value(known.learned_tokens, units.count)),
        ("times overwritten", Value(known.turnovers, units.ratio)),
        ("time to overwrite all", Value(known.turnover_s, units.duration)),
        ("tokens not draftable yet", Value(known.waiting_tokens, units.count)),
        ("requests forgotten", Value(known.forgotten_requests, units.count)),
        ("merges", Value(known.merges, units.count)),
        ("merges into the base tier", Value(known.base_merges, units.count)),
        ("full sorts", Value(known.full_builds, units.count)),
        ("memory", Value(namespace.memory_bytes, units.size)),
    )
    return [row for row in rows if row[1].number is not None]


def engines(namespace: NamespaceReport) -> list[tuple[str, Value]]:
    """Return the counters of the engines' clients."""
    clients = namespace.clients
    rows = (
        ("engines connected", namespace.streams),
        ("sequences running", namespace.sequences),
        ("late steps, without drafts", clients.timeouts),
        ("late answers dropped", clients.dropped),
        ("sequences sent again", clients.resyncs),
        ("reconnects", clients.reconnects),
        ("duplicate texts", namespace.duplicates),
        ("draft tokens withheld", namespace.budget.withheld_tokens),
    )
    return [(name, Value(number, units.count)) for name, number in rows]


def step_sizes(budget: BudgetReport) -> list[tuple[str, Value, Value, Value]]:
    """Return the recorded steps by number of tokens: how many, and their mean and expected durations."""
    largest = 1 << SIZES - 2
    return [
        (
            f"> {largest:,}" if size.most_tokens is None else units.span(size.most_tokens // 2 + 1, size.most_tokens),
            Value(size.steps, units.count),
            Value(size.mean_s, units.duration),
            Value(size.expected_s, units.duration),
        )
        for size in budget.step_sizes
    ]


def versions(known: Iterable[VersionReport]) -> list[tuple[str, *tuple[Value, ...]]]:
    """Return the cells under `VERSION_HEADS`."""
    return [
        (
            str(each.version),
            Value(each.requests, units.count),
            Value(each.committed, units.count),
            Value(each.tokens_per_step, units.ratio),
            Value(each.drafted, units.count),
            Value(each.accepted, units.count),
            Value(each.acceptance, units.share),
        )
        for each in known
    ]


def quantiles(latency: LatencyReport) -> list[tuple[str, Value]]:
    """Return the durations that are shown of a distribution."""
    return [(name, Value(getattr(latency, f"{name}_s"), units.duration)) for name in QUANTILES]
