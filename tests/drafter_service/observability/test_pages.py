"""Formatted numbers, scales, charts, tables and markup of pages."""

import math
import re
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from drafter_service.observability.pages import charts, page, tables, units
from drafter_service.observability.pages.charts import Chart, Panel
from drafter_service.observability.pages.tables import Value


@pytest.mark.parametrize(
    ("unit", "value", "written"),
    [
        (units.count, 0, "0"),
        (units.count, 9_412, "9,412"),
        (units.count, 12_345, "12.3k"),
        (units.count, 999_999, "1.00M"),
        (units.count, 4_560_000_000, "4.56G"),
        (units.size, 812, "812 B"),
        (units.size, 12.3 * 1024**2, "12.3 MiB"),
        (units.share, 0.0, "0%"),
        (units.share, 0.583, "58%"),
        (units.share, 0.042, "4.2%"),
        (units.share, 0.00001, "<0.01%"),
        (units.share, 0.9999, "99.9%"),
        (units.share, 1.0, "100%"),
        (units.ratio, 2.414, "2.41"),
        (units.ratio, 13.52, "13.5"),
        (units.ratio, 3_104, "3,104"),
        (units.duration, 0.00034, "340 µs"),
        (units.duration, 0.0123, "12.3 ms"),
        (units.duration, 0.9999, "1.00 s"),
        (units.duration, 59, "59.0 s"),
        (units.duration, 3_700, "61 min"),
        (units.duration, 2 * 3600 + 60, "2 h 1 min"),
        (units.duration, 3 * 86_400 + 4 * 3600, "3 d 4 h"),
        (units.moment, 0, "1970-01-01 00:00 UTC"),
        (units.moment, 1e300, units.UNKNOWN),
    ],
)
def test_numbers_are_formatted(unit, value, written):
    assert unit(value) == written


@pytest.mark.parametrize("unit", [units.count, units.size, units.share, units.ratio, units.duration])
@given(value=st.floats(0, 1e21))
def test_formatted_numbers_are_short(unit, value):
    assert 1 <= len(unit(value if unit is not units.share else math.fmod(value, 1.0))) <= 14
    assert unit(None) == units.UNKNOWN


def test_terminal_escapes_are_replaced():
    assert units.printable("a\x1b[2Jb\nc\u202e") == "a\ufffd[2Jb\ufffdc\ufffd"
    assert units.shortened("x" * 100, 10) == "x" * 9 + "…"


def test_a_single_thing_is_not_plural():
    written = [units.counted(number, "step") for number in (0, 1, 2, 12_345)]
    assert written == ["0 steps", "1 step", "2 steps", "12.3k steps"]


@pytest.mark.parametrize("largest", [1e-9, 0.3, 1.0, 2.0, 7.0, 10.0, 99.9, 1e6, 3e12])
def test_ticks_are_few_round_and_reach_the_largest_value(largest):
    marks = charts.ticks(largest)
    assert marks[0] == 0
    assert marks[-1] == pytest.approx(largest) or marks[-2] < largest < marks[-1]
    assert 3 <= len(marks) <= charts.MAX_TICKS + 1
    assert f"{marks[1]:.0e}"[0] in "125"
    assert charts.ticks(0.0) == charts.ticks(1.0, min_step=1) == [0.0, 1.0]


def test_text_is_escaped():
    evil, escaped = '<b>&"', "&lt;b&gt;&amp;&quot;"
    assert charts.element("text", kind=evil) == f'<text class="{escaped}"></text>'
    assert tables.html_table((evil,), [(evil,)]).count(escaped) == 2
    chart = Chart("rows", evil, {1: "green"}, reference=(1, evil))
    panel = charts.render_panel(Panel(evil, evil, (evil, evil), [(evil, Value(1, units.count))], chart))
    for shown in (charts.legend([("green", evil)]), page.card(evil, evil, evil), page.panel(evil, evil, ""), panel):
        assert evil not in shown


def test_numbers_keep_their_exact_value():
    assert tables.cell_markup(Value(0.123456, units.share)) == '<data value="0.123456">12%</data>'
    assert tables.cell_markup(Value(None, units.share)) == units.UNKNOWN


def test_page_forbids_scripts_and_carries_its_style():
    whole = page.page("<title>", "<p>b</p>", "<c>", lead="<d>", more="<p>e</p>")
    assert f'content="{page.POLICY}"' in whole
    assert "<title>&lt;title&gt;</title>" in whole
    assert "--green:" in whole
    head = '<header><h1>&lt;title&gt;</h1><p class="lead">&lt;d&gt;</p><p>e</p></header>'
    assert all(part in whole for part in (head, "<main><p>b</p></main>", "<footer>&lt;c&gt;</footer>"))
    with_heading = page.page("title", "", "", heading="a sentence")
    assert '<header><p class="kicker">title</p><h1>a sentence</h1></header>' in with_heading


def rows_of(*values, unit=units.ratio):
    """Return rows whose names are letters; values: those of the columns of a row."""
    return [("abcdefgh"[at], *(Value(value, unit) for value in row)) for at, row in enumerate(values)]


def drawn(kind, rows, heads=("things", "one", "two"), **chart):
    """Return a panel with one chart of its columns."""
    columns = chart.pop("columns", {1: "green", 2: "blue"})
    panel = Panel("Title", "", heads, rows, Chart(kind, "value", columns, **chart))
    return charts.render_panel(panel)


def test_lines_have_axes_dots_with_tooltips_and_a_legend():
    shown = drawn("rows", rows_of((0, 4), (5, 10), (10, 2)), dashed=2, reference=(5, "<half>"))
    # 400 x 268 pixels, of which the plotting area is 62 to 388 and 14 to 224.
    assert '<polyline points="62.0,224.0 225.0,119.0 388.0,14.0" class="line green">' in shown
    assert '<polyline points="62.0,140.0 225.0,14.0 388.0,182.0" class="dashed">' in shown
    assert '<line x1="62.0" y1="119.0" x2="388.0" y2="119.0" class="dashed">' in shown
    assert '<circle cx="225.0" cy="119.0" r="3.5" class="dot green"><title>b: one 5.00, two 10.0</title>' in shown
    assert shown.count("<circle") == 3
    assert 'aria-label="Title: one, two"' in shown
    for entry in ('line green"></i>one', 'dashed"></i>two', 'dashed"></i>&lt;half&gt;'):
        assert entry in shown
    labels = re.findall(r'text-anchor="(?:end|middle)">([^<]*)<', shown)
    assert labels == ["0.00", "2.00", "4.00", "6.00", "8.00", "10.0", "a", "b", "c"]
    assert "as a table" in shown


def test_lines_over_times_have_gaps_where_values_are_not_known():
    times = [
        (Value(60.0 * minute, units.moment), Value(value, units.ratio)) for minute, value in enumerate((1, 2, None, 2))
    ]
    shown = drawn("time", times, ("from", "one"), columns={1: "green"}, area=1, least=1)
    # Each run is a line with an area below, and a run of one point is a dot.
    assert [shown.count(f"<{name}") for name in ("polyline", "circle")] == [4, 1]
    assert '<polyline points="62.0,224.0 62.0,224.0 170.7,14.0 170.7,224.0" class="area green">' in shown
    assert shown.count('class="strip"') == 4
    assert [label in shown for label in (">Jan 1 00:00<", ">Jan 1 00:02<", "time (UTC)")] == [True] * 3


def test_bars_have_tooltips():
    rows = [("1\N{EN DASH}2", Value(0.5, units.share)), ("<b>", Value(1.0, units.share))]
    shown = drawn("bars", rows, ("things", "one"), columns={1: "green"})
    assert [shown.count(f'class="{kind}"') for kind in ("bar green", "strip")] == [2, 2]
    assert "<title>&lt;b&gt;: one 100%</title>" in shown
    assert ">1</text>" in shown, "the beginning of a range is its label"


def test_many_rows_have_few_labels():
    shown = drawn(
        "rows", [(f"row {number}", Value(1, units.count)) for number in range(100)], ("", "one"), columns={1: "blue"}
    )
    assert len(set(re.findall(r">(row \d+)</text>", shown))) == 8


def test_the_same_rows_are_shown_in_markdown_and_on_the_console():
    heads, rows = ("name", "tokens per step"), [("[a]", "1.25"), ("b", "10.5")]
    assert (
        tables.markdown_table(heads, rows)
        == "| name | tokens per step |\n| --- | --- |\n| [a] | 1.25 |\n| b | 10.5 |\n"
    )
    console = Console(width=40, file=StringIO())
    console.print(tables.console_table(heads, rows, title="all of them"))
    lines = console.file.getvalue().splitlines()
    assert [line.split() for line in lines if "." in line] == [["[a]", "1.25"], ["b", "10.5"]]
    assert "all of them" in lines[0]
