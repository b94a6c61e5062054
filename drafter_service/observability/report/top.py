"""`ssd-drafter top`: current rates of a service, one line per namespace and engine, redrawn at an interval."""

from __future__ import annotations

import math
import os
import select
import sys
import termios
import time
import tty
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from drafter_service.observability.facts import BOUNDS_S, quantile
from drafter_service.observability.report import units
from drafter_service.observability.report.engine_rates import engine_table
from drafter_service.observability.report.figures import drafting_of, ratio, seconds_between, sum_drafting
from drafter_service.observability.report.schema import Drafting, LatencyReport, NamespaceReport, Report
from drafter_service.observability.report.verdict import log_facts, service_facts, service_remarks
from ssd.errors import UserError

CURVE_WIDTH = 8
OTHER_LINES = 12
"""Number of lines of a frame that are neither namespaces nor engines."""
ENGINE_HEAD_LINES = 3
"""Number of lines above the first engine."""
WIDE = 110
"""Minimum number of columns at which more values are shown."""
QUIT = (b"q", b"Q", b"")
"""Input that quits; the empty string means that the terminal was closed. Ctrl-C interrupts as usual."""

Wait = Callable[[float], bool]
"""Function that waits for a number of seconds, or until the user quits; returns True if the user quit."""


def watch(fetch: Callable[[], Report], console: Console, wait: Wait, interval_s: float) -> None:
    """Redraw until the user quits. Raises UserError if the first report fails; later failures are shown."""
    monitor = Monitor()
    monitor.record(fetch())

    def screen() -> RenderableType:
        return Group(monitor.frame(console.width, console.height), Text(), Text("press q to quit", "dim"))

    live = Live(screen(), console=console, auto_refresh=False, screen=True)
    try:
        # Started inside the block, so that an interrupt during the start restores the terminal, too.
        live.start(refresh=True)
        while not wait(interval_s):
            try:
                monitor.record(fetch())
            except UserError as problem:
                monitor.record_failure(str(problem))
            live.update(screen(), refresh=True)
    finally:
        live.stop()


def print_once(fetch: Callable[[], Report], console: Console, wait: Wait, interval_s: float) -> None:
    """Print one frame for one interval. Raises UserError if there is no report."""
    monitor = Monitor()
    monitor.record(fetch())
    wait(interval_s)
    monitor.record(fetch())
    console.print(monitor.frame(console.width))


# --- Keys


def wait_without_keys(seconds: float) -> bool:
    """Wait if there is no keyboard."""
    time.sleep(seconds)
    return False


@contextmanager
def keys() -> Iterator[Wait]:
    """Switch the terminal to reading single keys without echo, and restore it at the end."""
    if not sys.stdin.isatty():
        yield wait_without_keys
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield lambda seconds: _wait(terminal, seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _wait(terminal: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([terminal], [], [], left)
        if ready and os.read(terminal, 1) in QUIT:
            return True
    return False


# --- Rates between two reports


class Rates(NamedTuple):
    """Rates of one namespace, or of all together. None: not known, such as before the second report."""

    name: str
    corpus_tokens: int
    streams: int
    sequences: int
    tokens_per_s: float | None = None
    steps_per_s: float | None = None
    drafts_per_s: float | None = None
    learned_per_s: float | None = None
    acceptance: float | None = None
    tokens_per_step: float | None = None
    draft_p50_s: float | None = None
    draft_p99_s: float | None = None
    step_s: float | None = None
    withheld_per_s: float | None = None


class _Change(NamedTuple):
    """Growth of the counters of a namespace between two reports."""

    drafting: Drafting
    learned_tokens: int
    latencies: Counter[float]
    """Number of drafts by the upper bound of their latency in seconds."""
    steps: float
    """Recorded steps of engines."""
    seconds: float
    """Sum of their durations."""
    withheld: int
    """Draft tokens that were not worth the time."""


def rates_of(before: Report | None, now: Report) -> list[Rates]:
    """Return the rates of each namespace in the report `now`, followed by those of all together."""
    seconds = seconds_between(before, now)
    known = {} if before is None or seconds is None else {one.name: one for one in before.namespaces}
    changes = [_change(known.get(one.name), one) for one in now.namespaces]
    rows = [
        _with_rates(Rates(one.name, one.corpus.tokens, one.streams or 0, one.sequences or 0), change, seconds)
        for one, change in zip(now.namespaces, changes, strict=True)
    ]
    total = Rates(
        "all",
        sum(row.corpus_tokens for row in rows),
        sum(row.streams for row in rows),
        sum(row.sequences for row in rows),
    )
    return [*rows, _with_rates(total, _sum([change for change in changes if change is not None]), seconds)]


def _change(before: NamespaceReport | None, now: NamespaceReport) -> _Change | None:
    # The counters of a namespace that was dropped and created again start at 0.
    if before is None or before.drafting.steps > now.drafting.steps:
        return None
    old, new = before.drafting, now.drafting
    drafting = drafting_of(
        new.steps - old.steps,
        new.committed - old.committed,
        new.hits - old.hits,
        new.drafted - old.drafted,
        new.accepted - old.accepted,
    )
    learned = max(0, (now.corpus.learned_tokens or 0) - (before.corpus.learned_tokens or 0))
    latencies = _counts(now.draft_latency) - _counts(before.draft_latency)
    steps, seconds, withheld = (max(0, end - begin) for begin, end in zip(_budget(before), _budget(now), strict=True))
    return _Change(drafting, learned, latencies, steps, seconds, int(withheld))


def _budget(namespace: NamespaceReport) -> tuple[float, float, float]:
    """Return the number of recorded steps, the sum of their durations, and the number of withheld draft tokens."""
    if namespace.budget is None:
        return 0, 0, 0
    sizes = namespace.budget.step_sizes
    seconds = sum(size.steps * size.mean_s for size in sizes)
    return sum(size.steps for size in sizes), seconds, namespace.budget.withheld_tokens


def _counts(latency: LatencyReport | None) -> Counter[float]:
    bins = [] if latency is None else latency.bins
    return Counter({math.inf if one.most_s is None else one.most_s: one.count for one in bins})


def _sum(changes: Sequence[_Change]) -> _Change | None:
    if not changes:
        return None
    return _Change(
        sum_drafting(change.drafting for change in changes),
        sum(change.learned_tokens for change in changes),
        sum((change.latencies for change in changes), Counter()),
        sum(change.steps for change in changes),
        sum(change.seconds for change in changes),
        sum(change.withheld for change in changes),
    )


def _with_rates(rates: Rates, change: _Change | None, seconds: float | None) -> Rates:
    if change is None or seconds is None:
        return rates
    drafting, latencies = change.drafting, sorted(change.latencies.items())
    return rates._replace(
        tokens_per_s=drafting.committed / seconds,
        steps_per_s=drafting.steps / seconds,
        drafts_per_s=drafting.hits / seconds,
        learned_per_s=change.learned_tokens / seconds,
        acceptance=drafting.acceptance,
        tokens_per_step=drafting.tokens_per_step,
        # Latencies above the last bound are not known more precisely.
        draft_p50_s=quantile(latencies, 0.5, BOUNDS_S[-1]) if latencies else None,
        draft_p99_s=quantile(latencies, 0.99, BOUNDS_S[-1]) if latencies else None,
        step_s=ratio(change.seconds, change.steps),
        withheld_per_s=change.withheld / seconds,
    )


# --- The frame


class Monitor:
    """The latest report, its changes since the previous one, and a curve of tokens per step for each namespace."""

    def __init__(self) -> None:
        self._report: Report | None = None
        self._rates: list[Rates] = []
        self._engines: Table | None = None
        self._curves: defaultdict[str, deque[float | None]] = defaultdict(lambda: deque(maxlen=CURVE_WIDTH))
        self._failure = ""

    def record(self, report: Report) -> None:
        """Replace the latest report."""
        self._rates = rates_of(self._report, report)
        self._engines = engine_table(self._report, report)
        self._report, self._failure = report, ""
        for rates in self._rates:
            self._curves[rates.name].append(rates.tokens_per_step)

    def record_failure(self, reason: str) -> None:
        """Keep the last report, and show why there is no newer one."""
        self._failure = reason

    def frame(self, width: int, height: int | None = None) -> RenderableType:
        """Return a frame for a terminal of this size; namespaces that do not fit are the least active ones."""
        report = self._report
        if report is None:
            return Text("waiting for the first report", "dim")
        facts = [units.moment(report.taken_at, "%H:%M:%S UTC")]
        if report.service is not None:
            facts += service_facts(report.service)
        lines: list[RenderableType] = [Text(" · ".join(facts), "dim", no_wrap=True, overflow="ellipsis")]
        if report.service is not None:
            lines += [Text(line, "dim") for line in log_facts(report.service.log)]
        others = OTHER_LINES + (0 if self._engines is None else ENGINE_HEAD_LINES + self._engines.row_count)
        lines += [Text(), self._table(width, None if height is None else max(1, height - others))]
        if self._engines is not None:
            lines += [Text(), self._engines]
        lines += [Text(f"! {remark}", "yellow") for remark in service_remarks(report)]
        if self._failure:
            lines.append(Text(f"! no new report: {units.shortened(self._failure, 200)}", "yellow"))
        return Group(*lines)

    def _table(self, width: int, most: int | None) -> Table:
        is_wide = width >= WIDE
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("namespace", min_width=8)
        heads = ["tok/s", "step/s", "t/step", "", "acc", "p50", "p99", "learn/s", "eng"]
        more = ["draft/s", "held/s", "step", "seqs", "corpus"] if is_wide else []
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
        curve = units.sparkline(list(self._curves[rates.name]), CURVE_WIDTH)
        cells: list[Text | str] = [
            Text(units.printable(rates.name), no_wrap=True, overflow="ellipsis"),
            units.rate(rates.tokens_per_s),
            units.rate(rates.steps_per_s),
            units.ratio(rates.tokens_per_step),
            Text(curve.rjust(CURVE_WIDTH), "green"),
            units.share(rates.acceptance),
            units.duration(rates.draft_p50_s),
            units.duration(rates.draft_p99_s),
            units.rate(rates.learned_per_s),
            units.count(rates.streams),
        ]
        if is_wide:
            cells += [
                units.rate(rates.drafts_per_s),
                units.rate(rates.withheld_per_s),
                units.duration(rates.step_s),
                units.count(rates.sequences),
                units.count(rates.corpus_tokens),
            ]
        return cells
