"""Current rates of each connected engine, as `ssd-drafter top` shows them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from drafter_service.observability.report import units
from drafter_service.observability.report.figures import ratio, seconds_between, share
from drafter_service.observability.report.schema import Report
from drafter_service.observability.report.verdict import engine_label

MAX_SHOWN = 8
"""Maximum number of engines that are shown, those with most tokens per second."""
TOTALS = ("streams", "steps", "committed", "drafted", "accepted", "engine_steps", "late_steps")

EngineTotals = dict[str, Counter[str]]


def engine_table(before: Report | None, now: Report) -> Table | None:
    """Return the rates between two reports of one process, by engine; None if no engine is connected."""
    seconds = seconds_between(before, now)
    known = {} if before is None or seconds is None else _totals(before)
    rows = {name: totals for name, totals in _totals(now).items() if totals["streams"]}
    if not rows:
        return None
    changes = {name: _change(known.get(name), totals) for name, totals in rows.items()}
    shown = sorted(rows, key=lambda name: (-(changes[name] or Counter())["committed"], name))[:MAX_SHOWN]
    heads = ("tok/s", "t/step", "acc", "late", "streams")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("engine", min_width=8)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name in shown:
        table.add_row(
            Text(name, no_wrap=True, overflow="ellipsis"), *_cells(rows[name]["streams"], changes[name], seconds)
        )
    if len(rows) > len(shown):
        table.add_row(Text(f"{len(rows) - len(shown)} not shown", "dim"), *[""] * len(heads))
    return table


def _totals(report: Report) -> EngineTotals:
    """Return the totals of each engine over all namespaces, by its name."""
    totals: EngineTotals = defaultdict(Counter)
    for namespace in report.namespaces:
        for each in namespace.by_client or ():
            totals[engine_label(each)].update({field: getattr(each, field) for field in TOTALS})
    return totals


def _change(before: Counter[str] | None, now: Counter[str]) -> Counter[str] | None:
    """Return the growth of the totals; None if it is not known: of a new engine, or after a namespace was unloaded."""
    if before is None or any(before[field] > now[field] for field in TOTALS[1:]):
        return None
    return now - before


def _cells(streams: int, change: Counter[str] | None, seconds: float | None) -> Sequence[str]:
    if change is None or seconds is None:
        return (*[units.UNKNOWN] * 4, units.count(streams))
    return (
        units.rate(change["committed"] / seconds),
        units.ratio(ratio(change["committed"], change["steps"])),
        units.share(share(change["accepted"], change["drafted"])),
        units.share(share(change["late_steps"], change["engine_steps"])),
        units.count(streams),
    )
