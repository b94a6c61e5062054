"""The status page in a real browser with a real server."""

import re

import pytest

from tests.browser import CHROMIUM, DRIVER, browser
from tests.engine.api.serving import KEY, MODEL, complete, eventually, metric

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def tab():
    with browser() as tab:
        yield tab


@pytest.fixture
def page(server, tab):
    """The tab, once it shows the figures."""
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    return tab


def text_of(tab, name):
    return tab.run(f"return document.getElementById({name!r}).textContent")


def submit(tab, prompt, *, key=KEY, tokens=60, temperature=0):
    for name, value in (("prompt", prompt), ("key", key), ("tokens", tokens), ("temperature", temperature)):
        tab.run(f"document.getElementById({name!r}).value = {value!r}")
    tab.run("document.getElementById('submit').click()")


def ask(tab, prompt, **more):
    """Submit the form and wait until the answer is complete."""
    submit(tab, prompt, **more)
    eventually(lambda: text_of(tab, "state") == "")


def numbers_of(text):
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", text)]


def source_of(tab, name):
    """Return accepted and drafted tokens of a source, and the share that its bar shows."""
    row = f"document.getElementById('source-{name}')"
    counts = tab.run(f"return {row}?.querySelector('small').textContent ?? ''")
    part = tab.run(f"return {row}?.querySelector('i').style.getPropertyValue('--share') ?? ''")
    return (*numbers_of(counts), float(part)) if counts else None


def answer(http, prompt):
    return complete(http, prompt=prompt, max_tokens=60, temperature=0)[0]


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (1100, True), (380, False)])
def test_the_page_fits_logs_no_errors_and_loads_no_external_resources(server, tab, width, dark):
    messages, addresses = tab.show(server.url, width, dark=dark)
    assert messages == []
    assert all(address.startswith(server.url) for address in addresses)
    assert tab.run("return document.documentElement.scrollWidth") <= width
    shade = tab.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, shade.removeprefix("rgb(").rstrip(")").split(","))) < 200) is dark


def test_figures_are_shown_and_updated(http, page):
    assert text_of(page, "drafter") == "ssd"
    answer(http, "def before(")
    before = eventually(lambda: text_of(page, "per-step").strip("\N{EN DASH}"))
    # Once the corpus is refreshed, the same request is drafted and steps accept more tokens.
    eventually(lambda: answer(http, "def before(") and float(text_of(page, "per-step")) > float(before))
    eventually(lambda: page.run("return document.querySelectorAll('#bars rect').length") > 0)
    eventually(lambda: page.run("return document.querySelector('#curve polyline')") is not None)
    eventually(lambda: metric(http, "vllm:num_requests_running") == 0)
    eventually(lambda: corpus_of(page) == metric(http, "ssd:corpus_tokens") > 60)
    shown = http.get("/figures").json()
    drafted, accepted = (shown[name]["corpus"] for name in ("drafted_by_source", "accepted_by_source"))
    eventually(lambda: source_of(page, "corpus") == (accepted, drafted, pytest.approx(accepted / drafted)))


def corpus_of(page):
    """Return the number of tokens of the corpus that the page shows."""
    return (numbers_of(text_of(page, "corpus")) or [None])[0]


def test_what_a_drafter_does_not_have_is_not_shown(page):
    # Shown and read at once, before the next update.
    *texts, points = page.run("""
        const none = {...previous, corpus: null, drafted_by_source: {corpus: 0, local: 0}}, texts = [];
        show({...none, drafter: "ngram"});
        texts.push($("corpus").textContent, $("sources").textContent, $("growth-plot").style.display);
        show({...none, drafted_by_source: {corpus: 0, local: 200}, accepted_by_source: {corpus: 0, local: 50}});
        texts.push($("sources").innerText.replaceAll("\\n", " "));
        show({...none, drafter: "ssd-remote", learned_tokens: 60});
        texts.push($("corpus").textContent);
        totals.length = 0;
        for (const tokens of [20, 50, 80]) show({...previous, corpus: {tokens, capacity: 2000}});
        return [...texts, $("corpus").textContent, document.querySelector("#growth .line").getAttribute("points")];
    """)
    assert "ngram" in texts[0]
    assert "stores no finished requests" in texts[0]
    assert texts[1:4] == ["no drafts yet", "none", "the request's own text 25 % 50 of 200"]
    assert texts[4].startswith("60 sent from this engine to the drafter service")
    assert texts[5] == "80 of at most 2,000"
    assert [float(point.split(",")[1]) for point in points.split()] == [67, 35.5, 4]  # y grows downwards.


def test_an_answer_is_streamed_with_drafted_text_marked(http, page):
    text = answer(http, "class Page(")

    def marked():
        ask(page, "class Page(")
        assert text_of(page, "answer") == text
        return page.run("return [...document.querySelectorAll('#answer mark')].map(mark => mark.textContent).join('')")

    eventually(lambda: len(text) / 2 < len(marked()) < len(text))  # On a busy machine drafting may not pay at first.
    assert "60 tokens in" in text_of(page, "usage")


def test_errors_are_shown(page):
    ask(page, "x", key="error")
    assert "give a valid key" in text_of(page, "error")
    ask(page, "x " * 5000)
    assert "shorten the prompt" in text_of(page, "error")
    ask(page, "def f(", tokens=5)
    assert text_of(page, "error") == ""


def test_a_running_answer_can_be_stopped(http, page):
    submit(page, "def f(", tokens=900, temperature=1.5)
    eventually(lambda: text_of(page, "answer"))
    page.run("document.getElementById('stop').click()")
    eventually(lambda: text_of(page, "state") == "")
    eventually(lambda: metric(http, "vllm:num_requests_running") == 0)


def test_an_unreachable_server_is_reported(page):
    def set_reachable(is_reachable):
        conditions = {"offline": not is_reachable, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        page.devtools("Network.emulateNetworkConditions", conditions)

    set_reachable(False)
    eventually(lambda: "no figures" in text_of(page, "offline"))
    set_reachable(True)
    eventually(lambda: text_of(page, "offline") == "")
