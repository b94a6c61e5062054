"""The live view: rates between two reports, frames, and restoring the terminal."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from drafter_service.observability.facts import BOUNDS_S, Engine, Latency
from drafter_service.observability.report import units
from drafter_service.observability.report.build import build_report
from drafter_service.observability.report.top import Monitor, print_once, rates_of, watch
from ssd.errors import UserError
from ssd.stats import Stats
from tests.drafter_service.observability.report.samples import (
    NOW,
    Reporter,
    busy_namespace,
    corpus_of,
    engine_use,
    new_namespace,
    reporting,
    service,
)

TIMEOUT_S = 30


def namespace(name, steps, committed, hits, drafted, accepted, learned, slow):
    stats, latency = Stats(), Latency()
    stats.counters.steps[:] = steps, committed, hits
    stats.counters.by_source[0] = drafted, accepted
    for _ in range(90):
        latency.record(0.001)
    for _ in range(slow):
        latency.record(0.1)
    corpus = corpus_of(10_000, 5000, 5, learned)
    return new_namespace(name, stats=stats, draft_latency=latency, corpus=corpus, streams=2, sequences=9)


BEFORE = build_report(
    service(namespace("a", 100, 150, 50, 200, 50, 1000, 0), namespace("b", 10, 10, 0, 0, 0, 0, 0), now=NOW)
)
AFTER = build_report(
    service(namespace("a", 140, 270, 80, 300, 130, 1600, 50), namespace("b", 20, 30, 0, 0, 0, 100, 0), now=NOW + 2)
)


def test_rates_are_differences_per_second():
    a, b, total = rates_of(BEFORE, AFTER)
    assert (a.name, a.tokens_per_s, a.steps_per_s, a.drafts_per_s) == ("a", 60, 20, 15)
    assert (a.tokens_per_step, a.acceptance, a.learned_per_s) == (3.0, 0.8, 300)
    # All drafts since the first report were slow.
    bound = next(bound for bound in BOUNDS_S if bound >= 0.1)
    assert a.draft_p50_s == a.draft_p99_s == bound
    assert (b.tokens_per_step, b.acceptance, b.draft_p50_s) == (2.0, None, None)
    assert (total.name, total.tokens_per_s, total.tokens_per_step, total.acceptance) == ("all", 70, 2.8, 0.8)
    assert (total.corpus_tokens, total.streams, total.sequences, total.learned_per_s) == (10_000, 4, 18, 350)


def test_rates_need_an_earlier_report_of_the_same_process():
    restarted = AFTER.model_copy(update={"service": AFTER.service.model_copy(update={"started_at": NOW + 1})})
    for before, after in ((None, AFTER), (BEFORE, restarted), (AFTER, AFTER), (AFTER, BEFORE)):
        for rates in rates_of(before, after):
            assert rates.tokens_per_s is rates.tokens_per_step is rates.draft_p50_s is None
            assert rates.corpus_tokens >= 5000


def test_new_and_recreated_namespaces_have_no_rates_yet():
    again = build_report(service(namespace("a", 1, 1, 0, 0, 0, 1, 0), namespace("c", 1, 1, 0, 0, 0, 1, 0), now=NOW + 2))
    a, c, total = rates_of(BEFORE, again)
    assert a.tokens_per_s is c.tokens_per_s is total.tokens_per_s is None


def frame_of(monitor, width, height=None):
    text = io.StringIO()
    Console(file=text, width=width).print(monitor.frame(width, height))
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_frame_fits_the_width_and_has_one_row_per_namespace(width):
    monitor = Monitor()
    for second in range(12):
        spaces = [busy_namespace(f"team-{n}/{'long' * 20}", steps=(100 + second) * 10**n) for n in range(5)]
        monitor.record(build_report(service(*spaces, now=NOW + second)))
    text = frame_of(monitor, width)
    assert max(cell_len(line) for line in text.split("\n")) <= width
    rows = [line for line in text.split("\n") if line.startswith(("team-", "all"))]
    assert [row[:6] for row in rows[:5]] == [f"team-{n}" for n in range(5)]
    assert rows[5].startswith("all")
    assert all("▁" in row or "█" in row for row in rows)


def test_most_active_namespaces_are_shown_where_there_is_no_room_for_all():
    monitor = Monitor()
    for second in range(2):
        spaces = [busy_namespace(f"n{n:02}", steps=1000 + second * n) for n in range(30)]
        monitor.record(build_report(service(*spaces, now=NOW + second)))
    text = frame_of(monitor, 80, 24)
    assert len(text.split("\n")) <= 24
    assert "n29" in text
    assert "n05" not in text
    assert "all, 22 not shown" in text
    assert "node-3:4711" in text


def test_connected_engines_have_rates_over_all_namespaces():
    def uses(**engines):
        return {Engine("vllm/1", name): engine_use(*numbers) for name, numbers in engines.items()}

    def rows(monitor):
        lines = frame_of(monitor, 100).split("\n")
        return {cells[0]: cells[1:] for line in lines if (cells := line.split()) and cells[0][-1:] == "1"}

    def spaces(*parts):
        return [new_namespace(name, uses=part) for name, part in zip("ab", parts, strict=True)]

    before = spaces(uses(quick1=(1, 100, 200, 50, 0), gone11=(1, 5, 5)), uses(quick1=(1, 10, 10, 10, 0)))
    after = spaces(
        uses(quick1=(1, 150, 400, 90, 3), gone11=(0, 5, 5), fresh1=(1, 7, 7)), uses(quick1=(1, 20, 30, 20, 2))
    )
    monitor = Monitor()
    monitor.record(build_report(service(*before, now=NOW)))
    monitor.record(build_report(service(*after, now=NOW + 2)))
    # 220 tokens of 60 sequence steps in 2 s, and 5 late ones of 50 engine steps, in two streams.
    unknown = units.UNKNOWN
    assert rows(monitor) == {"quick1": ["110", "3.67", unknown, "10%", "2"], "fresh1": [*[unknown] * 4, "1"]}


def test_print_once_shows_the_rates_of_one_interval():
    console = Console(file=io.StringIO(), width=100)
    reports = iter([BEFORE, AFTER])
    waited = []
    print_once(lambda: next(reports), console, waited.append, 2.5)
    row = next(line.split() for line in console.file.getvalue().split("\n") if line.startswith("a "))
    assert [cell for cell in row if not set(cell) & set("▁█")] == [
        "a",
        "60",
        "20",
        "3.00",
        "80%",
        *["116", "ms"] * 2,
        "300",
        "2",
    ]
    assert waited == [2.5]


def test_watching_continues_when_a_report_fails():
    answers = iter([BEFORE, UserError("gone [away]"), AFTER])
    frames, turns = io.StringIO(), iter([False, False, True])

    def fetch():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch(fetch, Console(file=frames, width=80, height=30, force_terminal=True), lambda _: next(turns), 1.0)
    drawn = frames.getvalue()
    assert "no new report: gone [away]" in drawn
    assert "3.00" in drawn[drawn.index("no new report") :]


def test_watching_fails_without_a_first_report():
    def fetch():
        raise UserError("no drafter answers")

    with pytest.raises(UserError, match="no drafter"):
        watch(fetch, Console(file=io.StringIO()), lambda _: True, 1.0)


# A shell that runs the tests in the background lets them ignore interrupts.
TOP = """
import signal
from drafter_service.commands.report import top
signal.signal(signal.SIGINT, signal.default_int_handler)
top()
"""


@pytest.mark.parametrize("leave", ["q", "interrupt"])
def test_terminal_is_restored(socket_address, leave):
    """The command in a pseudo-terminal uses the alternate screen, and returns to the normal one."""
    changing = [replace(service(busy_namespace(steps=1000 + second)), now=NOW + second) for second in range(50)]
    documents = [build_report(facts).model_dump_json() for facts in changing]
    ours, theirs = pty.openpty()
    with reporting(socket_address, Reporter(*documents)):
        process = subprocess.Popen(
            [sys.executable, "-c", TOP, "--address", socket_address, "--interval", "0.1"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )
        os.close(theirs)
        seen = read_until(ours, b"press q to quit")
        assert b"\x1b[?1049h" in seen
        if leave == "q":
            os.write(ours, b"xq")
        else:
            process.send_signal(signal.SIGINT)
        seen += read_until(ours, b"\x1b[?1049l")
        assert process.wait(TIMEOUT_S) == 0
    os.close(ours)
    assert b"default" in seen
    assert b"Traceback" not in seen


def read_until(terminal, wanted):
    """Return the output of a terminal up to and including `wanted`."""
    seen, until = b"", time.monotonic() + TIMEOUT_S
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        assert ready, seen
        try:
            seen += os.read(terminal, 4096)
        except OSError:  # The other end is closed.
            raise AssertionError(seen) from None
    return seen
