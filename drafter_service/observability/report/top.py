"""What a service does now, a line a namespace, drawn again and again."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from drafter_service.observability.report import units
from drafter_service.observability.report.bars import sparkline
from drafter_service.observability.report.keys import Wait
from drafter_service.observability.report.rates import Rates, rates_of
from drafter_service.observability.report.schema import Report
from drafter_service.observability.report.verdict import log_facts, service_facts, service_remarks
from ssd.errors import UserError

CURVE_WIDTH = 8
OTHER_LINES = 12
"""Of a frame, beside the namespaces."""
WIDE = 110
"""Columns from which there is room for more figures."""


class Monitor:
    """The newest report, what changed since the one before, and a curve of tokens per step of each namespace."""

    def __init__(self) -> None:
        self._report: Report | None = None
        self._rates: list[Rates] = []
        self._curves: defaultdict[str, deque[float | None]] = defaultdict(lambda: deque(maxlen=CURVE_WIDTH))
        self._trouble = ""

    def note(self, report: Report) -> None:
        """A new report came."""
        self._rates = rates_of(self._report, report)
        self._report, self._trouble = report, ""
        for rates in self._rates:
            self._curves[rates.name].append(rates.tokens_per_step)

    def note_trouble(self, reason: str) -> None:
        """None came; what is known stays."""
        self._trouble = reason

    def frame(self, width: int, height: int | None = None) -> RenderableType:
        """All of it, for a terminal of so many columns; of more namespaces than it has lines for, the busiest."""
        report = self._report
        if report is None:
            return Text("waiting for the first report", "dim")
        facts = [units.moment(report.taken_at, "%H:%M:%S UTC")]
        if report.service is not None:
            facts += service_facts(report.service)
        lines: list[RenderableType] = [Text(" · ".join(facts), "dim", no_wrap=True, overflow="ellipsis")]
        if report.service is not None:
            lines += [Text(line, "dim") for line in log_facts(report.service.log)]
        lines += [Text(), self._table(width, None if height is None else max(1, height - OTHER_LINES))]
        lines += [Text(f"! {remark}", "yellow") for remark in service_remarks(report)]
        if self._trouble:
            lines.append(Text(f"! no news: {units.shortened(self._trouble, 200)}", "yellow"))
        return Group(*lines)

    def _table(self, width: int, most: int | None) -> Table:
        is_wide = width >= WIDE
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("namespace", min_width=8)
        heads = ["tok/s", "step/s", "t/step", "", "kept", "p50", "p99", "learn/s", "eng"]
        more = ["draft/s", "seqs", "corpus"] if is_wide else []
        for head in heads + more:
            table.add_column(head, justify="left" if head == "" else "right", no_wrap=True)
        *namespaces, total = self._rates
        shown = sorted(namespaces, key=lambda rates: -(rates.tokens_per_s or 0.0))[:most]
        for rates in sorted(shown, key=lambda rates: rates.name):
            table.add_row(*self._cells(rates, is_wide))
        if len(namespaces) != 1:
            table.add_section()
            hidden = len(namespaces) - len(shown)
            cells = self._cells(total, is_wide)
            if hidden:
                cells[0] = f"all, {hidden} not shown"
            table.add_row(*cells, style="bold")
        return table

    def _cells(self, rates: Rates, is_wide: bool) -> list[Text | str]:
        cells: list[Text | str] = [
            Text(units.printable(rates.name), no_wrap=True, overflow="ellipsis"),
            units.rate(rates.tokens_per_s),
            units.rate(rates.steps_per_s),
            units.ratio(rates.tokens_per_step),
            Text(sparkline(list(self._curves[rates.name]), CURVE_WIDTH).rjust(CURVE_WIDTH), "green"),
            units.share(rates.acceptance),
            units.duration(rates.draft_p50_s),
            units.duration(rates.draft_p99_s),
            units.rate(rates.learned_per_s),
            units.count(rates.streams),
        ]
        if is_wide:
            cells += [units.rate(rates.drafts_per_s), units.count(rates.sequences), units.count(rates.corpus_tokens)]
        return cells


def watch(fetch: Callable[[], Report], console: Console, wait: Wait, interval_s: float) -> None:
    """Draw until told to quit. Raises UserError if there is no report at all; later ones may fail to come."""
    monitor = Monitor()
    monitor.note(fetch())

    def drawn() -> RenderableType:
        return Group(monitor.frame(console.width, console.height), Text(), Text("q quits", "dim"))

    live = Live(drawn(), console=console, auto_refresh=False, screen=True)
    try:
        # Within the block: an interrupt while it starts must give the terminal back too.
        live.start(refresh=True)
        while not wait(interval_s):
            try:
                monitor.note(fetch())
            except UserError as problem:
                monitor.note_trouble(str(problem))
            live.update(drawn(), refresh=True)
    finally:
        live.stop()


def print_once(fetch: Callable[[], Report], console: Console, wait: Wait, interval_s: float) -> None:
    """One frame, of what happened in one interval. Raises UserError if there is no report."""
    monitor = Monitor()
    monitor.note(fetch())
    wait(interval_s)
    monitor.note(fetch())
    console.print(monitor.frame(console.width))
