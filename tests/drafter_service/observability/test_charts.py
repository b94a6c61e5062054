"""Scales, ticks and markup of the chart functions."""

import pytest

from drafter_service.observability import charts
from drafter_service.observability.charts import Frame, Markup, Value


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
    assert charts.table((evil,), [(Markup("<i></i>"),), (evil,)]).count(escaped) == 2
    assert "<td><i></i></td>" in charts.table(("",), [(Markup("<i></i>"),)])
    for shown in (charts.legend([("green", evil)]), charts.card(evil, evil, evil), charts.panel(evil, evil, "")):
        assert evil not in shown


def test_numbers_keep_their_exact_value():
    assert charts.cell_markup(Value(0.123456, percent)) == '<data value="0.123456">12%</data>'
    assert charts.cell_markup(Value(None, percent)) == "unknown"
    assert charts.description_list([("share", Value(None, percent))]) == "<dl><dt>share</dt><dd>unknown</dd></dl>"


def test_tables_have_groups_and_column_classes():
    shown = charts.table(("a", "b"), [("1", "2")], [("3", "4")], kinds=("name", ""))
    assert shown.count("<tbody>") == 2
    assert '<th class="name">a</th><th>b</th>' in shown
    assert '<td class="name">3</td><td>4</td>' in shown
    with pytest.raises(ValueError, match="zip"):
        charts.table(("a", "b"), [("1",)])


def test_sparkline_needs_two_values():
    assert charts.sparkline([None, 1.0, None], "values") == ""
    assert 'points="1.0,21.0 99.0,3.0"' in charts.sparkline([1.0, None, 2.0], "values")


def test_page_forbids_scripts_and_carries_its_style():
    page = charts.page("<title>", "<h1>a</h1>", "<p>b</p>", "c")
    assert f'content="{charts.POLICY}"' in page
    assert "<title>&lt;title&gt;</title>" in page
    assert "--green:" in page
    assert all(part in page for part in ("<header><h1>a</h1>", "<main><p>b</p>", "<footer>c"))
