"""Scales, charts, tables and markup of pages."""

from io import StringIO

import pytest
from rich.console import Console

from drafter_service.observability.pages import charts, page, tables
from drafter_service.observability.pages.charts import Axis, Frame, Series
from drafter_service.observability.pages.tables import Markup, Value


def percent(number):
    return "unknown" if number is None else f"{number:.0%}"


def test_scales_clip_values_and_accept_an_empty_range():
    frame = Frame(width=100, height=50, left=10, right=10, top=5, bottom=5)
    x, y = frame.x_scale(0, 4), frame.y_scale(0, 1)
    assert [x(0), x(2), x(4), x(9), x(-1)] == [10, 50, 90, 90, 10]
    assert [y(0), y(1)] == [45, 5]
    assert frame.x_scale(3, 3)(3) == 10


@pytest.mark.parametrize("largest", [1e-9, 0.3, 1.0, 2.0, 7.0, 10.0, 99.9, 1e6, 3e12])
def test_ticks_are_few_round_and_reach_the_largest_value(largest):
    marks = charts.ticks(largest)
    assert marks[0] == 0
    assert marks[-1] == pytest.approx(largest) or marks[-2] < largest < marks[-1]
    assert 3 <= len(marks) <= charts.MAX_TICKS + 1
    assert f"{marks[1]:.0e}"[0] in "125"


def test_ticks_without_values_and_of_counts():
    assert charts.ticks(0.0) == [0.0, 1.0]
    assert charts.ticks(1.0, min_step=1) == [0.0, 1.0]


def test_text_is_escaped_and_markup_is_not():
    evil = '<b>&"'
    escaped = "&lt;b&gt;&amp;&quot;"
    assert charts.text(evil, 1, 2, kind=evil) == f'<text x="1.0" y="2.0" class="{escaped}">{escaped}</text>'
    assert charts.circle(1, 2, 3, evil).endswith(f"<title>{escaped}</title></circle>")
    assert f'aria-label="{escaped}"' in charts.chart(Frame(), evil, [])
    assert tables.html_table((evil,), [(Markup("<i></i>"),), (evil,)]).count(escaped) == 2
    assert "<td><i></i></td>" in tables.html_table(("",), [(Markup("<i></i>"),)])
    for shown in (charts.legend([("green", evil)]), page.card(evil, evil, evil), page.panel(evil, evil, "")):
        assert evil not in shown


def test_numbers_keep_their_exact_value():
    assert tables.cell_markup(Value(0.123456, percent)) == '<data value="0.123456">12%</data>'
    assert tables.cell_markup(Value(None, percent)) == "unknown"


def test_tables_have_groups_and_column_classes():
    shown = tables.html_table(("a", "b"), [("1", "2")], [("3", "4")], kinds=("name", ""))
    assert shown.count("<tbody>") == 2
    assert '<th class="name">a</th><th>b</th>' in shown
    assert '<td class="name">3</td><td>4</td>' in shown
    with pytest.raises(ValueError, match="zip"):
        tables.html_table(("a", "b"), [("1",)])


def test_sparkline_needs_two_values():
    assert charts.sparkline([None, 1.0, None], "values") == ""
    assert 'points="1.0,21.0 99.0,3.0"' in charts.sparkline([1.0, None, 2.0], "values")


def test_page_forbids_scripts_and_carries_its_style():
    whole = page.page("<title>", "<p>b</p>", "<c>", lead="<d>", more="<p>e</p>")
    assert f'content="{page.POLICY}"' in whole
    assert "<title>&lt;title&gt;</title>" in whole
    assert "--green:" in whole
    head = '<header><h1>&lt;title&gt;</h1><p class="lead">&lt;d&gt;</p><p>e</p></header>'
    assert all(part in whole for part in (head, "<main><p>b</p></main>", "<footer>&lt;c&gt;</footer>"))
    with_heading = page.page("title", "", "", heading="a sentence")
    assert '<header><p class="kicker">title</p><h1>a sentence</h1></header>' in with_heading


def test_a_line_chart_has_axes_marks_and_a_legend():
    frame = Frame(width=110, height=60, left=10, right=0, top=10, bottom=0)
    series = [
        Series("a", "green", [(0, 0), (2, 5)]),
        Series("b", "blue", [(1, 10)], "dots", ["one"]),
        Series("c", "gray", [], "dots"),
        Series("d", "amber", [(0, 10), (2, 10)], "area"),
    ]
    x, y = Axis.of(["p", "q", "r"], "things"), Axis.to(9, "units")
    shown = charts.line_chart("all", x, y, series, frames=[frame], reference=(5, "half"))
    assert shown.count("<polyline") == 3
    assert '<polyline points="10.0,60.0 110.0,35.0" class="line green">' in shown
    assert '<circle cx="60.0" cy="10.0" r="3.5" class="dot blue"><title>one</title></circle>' in shown
    assert '<polyline points="10.0,60.0 10.0,10.0 110.0,10.0 110.0,60.0" class="area amber">' in shown
    assert '<line x1="10.0" y1="35.0" x2="110.0" y2="35.0" class="dashed">' in shown
    for entry in ("line green", "blue", "gray", "amber", "dashed"):
        assert f'<i class="{entry}"></i>' in shown
    both = charts.line_chart("all", x, y, series, frames=[frame, frame])
    assert [both.count(f'class="{kind}" role') for kind in ("wide", "narrow")] == [1, 1]
    assert both.count("legend") == 1


def test_lines_have_gaps_where_values_are_not_known():
    points = [(0, 1.0), (1, 2.0), (2, None), (3, 2.0)]
    shown = charts.line_chart("all", Axis.of("pqrs", "x"), Axis.to(2, "y"), [Series("a", "green", points, "area")])
    assert [shown.count(f"<{name}") for name in ("polyline", "circle")] == [4, 1]


def test_a_bar_chart_has_bars_below_and_tooltips():
    bars = [Series("many", "green", [(0, 1), (1, None)]), Series("few", "green pale", [(0, None), (1, 2)])]
    below = Axis.to(9, "tokens"), Series("tokens", "violet", [(0, 9), (1, 4)])
    shown = charts.bar_chart("all", Axis.of("pq", "x"), Axis.to(2, "y"), bars, below=below, words=["<a>", "b"])
    kinds = ("bar green", "bar green pale", "volume violet", "strip")
    assert [shown.count(f'class="{kind}"') for kind in kinds] == [1, 1, 2, 2]
    assert "<title>&lt;a&gt;</title>" in shown
    assert [f'<i class="{color}"></i>' in shown for color in ("green", "green pale", "violet")] == [True] * 3
    alone = charts.bar_chart("all", Axis.of("p", "x"), Axis.to(2, "y"), [bars[0], Series("none", "blue", [(0, None)])])
    assert "blue" not in alone


def test_axes_end_at_a_round_number_or_at_the_largest_value():
    assert Axis.to(9, "units")[2:] == (10, [(0, "0"), (2, "2"), (4, "4"), (6, "6"), (8, "8"), (10, "10")])
    assert Axis.to(9, "units", is_exact=True)[2:] == (9, [(0, "0"), (2, "2"), (4, "4"), (6, "6"), (8, "8")])
    assert [label for _, label in Axis.of([*"abcdefg"], "letters", at_most=3).marks] == ["a", "d", "g"]


def test_the_same_rows_are_shown_in_markdown_and_on_the_console():
    heads, rows = ("name", "tokens per step"), [("[a]", "1.25"), ("b", "10.5")]
    assert (
        tables.markdown_table(heads, rows)
        == "| name | tokens per step |\n| --- | --- |\n| [a] | 1.25 |\n| b | 10.5 |\n"
    )
    console = Console(width=40, file=StringIO())
    console.print(tables.console_table(heads, rows[:1], rows[1:], title="all of them"))
    lines = console.file.getvalue().splitlines()
    assert [line.split() for line in lines if "." in line] == [["[a]", "1.25"], ["b", "10.5"]]
    assert "all of them" in lines[0]
