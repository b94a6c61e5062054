"""The page loads nothing, escapes all text, and shows the report's own numbers in a real browser."""

import json

import pytest

from drafter_service.observability.pages import units
from drafter_service.observability.report import page as page_module
from drafter_service.observability.report.build import build_report
from drafter_service.observability.report.page import render_page
from tests.browser import CHART_FAULTS, CHROMIUM, DRIVER, OUTSIDE, browser
from tests.drafter_service.observability.report.samples import SERVICES
from tests.markup import tags_of

REPORTS = {name: build_report(facts()) for name, facts in SERVICES.items()}


@pytest.mark.parametrize("name", SERVICES)
def test_page_is_balanced_and_refers_to_nothing(name):
    page = render_page(REPORTS[name])
    tags_of(page)
    assert "<b>x" not in page


@pytest.fixture(scope="module")
def tab():
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium with chromedriver here: install both to check the page in a real browser")
    with browser() as tab:
        yield tab


@pytest.fixture(scope="module")
def page_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")

    def write(name):
        path = folder / f"{name}.html"
        path.write_text(render_page(REPORTS[name]), encoding="utf-8")
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "MAX_IN_FULL", 3)  # One open, the others closed.
        yield write


FAINT = """
function parts(color) { return color.match(/[\\d.]+/g).map(Number); }
function light(color) {
  const [r, g, b] = parts(color).map(part => part / 255).map(
    part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function ground(one) {
  for (; one; one = one.parentElement) {
    const [r, g, b, a] = parts(getComputedStyle(one).backgroundColor);
    if (a === undefined || a > 0) return getComputedStyle(one).backgroundColor;
  }
}
const found = new Set();
for (const one of document.querySelectorAll('h1, h2, h3, p, b, td, th, dt, dd, summary, span, em, footer, svg text')) {
  if (!one.getBoundingClientRect().width) continue;
  const style = getComputedStyle(one), inside = one.tagName === 'text';
  const rect = one.classList.contains('on-bar') ? getComputedStyle(one.previousElementSibling).fill : ground(one);
  const pair = [light(inside ? style.fill : style.color), light(rect)].sort((a, b) => b - a);
  if ((pair[0] + 0.05) / (pair[1] + 0.05) < 4.5) found.add(one.tagName + ' ' + one.className + ' ' + one.textContent);
}
return [...found];
"""


@pytest.mark.parametrize("name", ["new", "begun", "few", "huge"])
def test_page_fits_the_screen_and_requests_nothing(tab, page_of, name):
    page = page_of(name)
    for width, dark in ((400, True), (1400, False)):
        messages, requests = tab.show(page, width, dark=dark)
        assert messages == []
        assert requests == [page.as_uri()]
        assert tab.run("return innerWidth") == width
        tab.run("for (const one of document.querySelectorAll('details')) one.open = true;")
        assert tab.run(OUTSIDE) == []
        assert tab.run(CHART_FAULTS) == []
        assert tab.run("return [...document.querySelectorAll('svg')].filter(one => !one.ariaLabel).length") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast(tab, page_of, dark):
    tab.show(page_of("few"), 1400, dark=dark)
    assert tab.run(FAINT) == []


TABLES = """
function figure(cell) {
  const data = cell.querySelector('data');
  return data ? Number(data.value) : cell.textContent;
}
const tables = {};
for (const panel of document.querySelectorAll('figure')) {
  const rows = [...panel.querySelectorAll('tbody tr')].map(row => [...row.cells].map(figure));
  tables[panel.querySelector('h3').textContent] = rows;
}
return tables;
"""
CARDS = """
return Object.fromEntries([...document.querySelectorAll('.card')].map(
  card => [card.querySelector('span').textContent, card.querySelector('b').textContent]));
"""


def test_values_on_the_page_are_those_of_the_json(tab, page_of):
    tab.show(page_of("one"), 1400)
    document = json.loads(REPORTS["one"].model_dump_json())
    known = document["namespaces"][0]
    drafting = known["drafting"]
    assert tab.run(CARDS) == {
        "tokens per step": units.ratio(drafting["tokens_per_step"]),
        "steps saved": units.share(drafting["saved_share"]),
        "hit rate": units.share(drafting["hit_rate"]),
        "acceptance": units.share(drafting["acceptance"]),
        "output tokens": units.count(drafting["committed"]),
    }
    tables = tab.run(TABLES)

    def columns(rows, *names):
        # Null is shown as a dash.
        return [[units.UNKNOWN if row[name] is None else row[name] for name in names] for row in rows]

    def shown(title, first=1):
        return [row[first:] for row in tables[title]]

    tally = ("acceptance", "drafted", "accepted")
    assert shown("By position in the draft") == columns(known["by_position"], *tally, "accepted_share_of_drafts")
    assert shown("By source", 0) == columns(known["by_source"], "source", *tally)
    assert shown("By age of the text") == columns(known["age"]["bins"], *tally)
    assert shown("Calibration") == columns(known["calibration"]["bins"], "predicted", "acceptance", "drafted")
    periods = known["over_time"]
    assert shown("Over time") == columns(periods, "tokens_per_step", "committed", "timeouts")
    assert shown("Hit rate and acceptance over time") == columns(periods, "hit_rate", "acceptance")
    assert shown("Occupancy") == columns(known["over_time"], "corpus_tokens", "learned_tokens", "memory_bytes")
    for title, field in (("Draft latency", "draft_latency"), ("Merge latency", "merge_latency")):
        assert shown(title) == columns(known[field]["bins"], "count")
    lists = dict(tables["The corpus"]) | dict(tables["Activity"]) | dict(tables["The service"])
    assert lists["tokens remembered"] == known["corpus"]["tokens"]
    assert lists["requests remembered"] == known["corpus"]["requests"]
    assert lists["capacity, tokens"] == known["corpus"]["capacity_tokens"]
    assert lists["memory"] == known["memory_bytes"]
    assert lists["late steps, without drafts"] == known["clients"]["timeouts"]
    assert lists["duplicate texts"] == known["duplicates"]
    assert lists["shared log: tokens written"] == document["service"]["log"]["published_tokens"]
