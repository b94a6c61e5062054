"""The status page in a real browser with a real server."""

import re

import httpx
import pytest

from tests.browser import CHROMIUM, DRIVER, browser
from tests.engine.api.serving import MODEL, TIMEOUT_S, eventually, serving

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
KEY = "secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    with serving("--api-keys", str(keys)) as server:
        yield server


@pytest.fixture(scope="module")
def tab():
    with browser() as tab:
        yield tab


def text_of(tab, name):
    return tab.run(f"return document.getElementById({name!r}).textContent")


def ask(tab, prompt, *, key=KEY, tokens=60):
    """Submit the form and wait until the answer is complete."""
    for name, value in (("prompt", prompt), ("key", key), ("tokens", tokens), ("temperature", 0)):
        tab.run(f"document.getElementById({name!r}).value = {value!r}")
    tab.run("document.getElementById('submit').click()")
    eventually(lambda: tab.run("return document.getElementById('state').textContent === ''"))


def numbers_of(text):
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", text)]


def figures(server):
    return httpx.get(f"{server.url}/figures").json()


def source_of(tab, name):
    """Return accepted and drafted tokens of a source, and the share that its bar shows."""
    row = f"document.getElementById('source-{name}')"
    counts = tab.run(f"return {row}?.querySelector('small').textContent ?? ''")
    part = tab.run(f"return {row}?.querySelector('i').style.getPropertyValue('--share') ?? ''")
    return (*numbers_of(counts), float(part)) if counts else None


def complete(server, prompt, **more):
    payload = {"model": MODEL, "prompt": prompt, "max_tokens": 60, "temperature": 0} | more
    answer = httpx.post(
        f"{server.url}/v1/completions", json=payload, headers={"Authorization": f"Bearer {KEY}"}, timeout=TIMEOUT_S
    )
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (1100, True), (380, False)])
def test_the_page_fits_logs_no_errors_and_loads_no_external_resources(server, tab, width, dark):
    messages, addresses = tab.show(server.url, width, dark=dark)
    assert messages == []
    assert all(address.startswith(server.url) for address in addresses)
    assert tab.run("return document.documentElement.scrollWidth") <= width
    shade = tab.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, shade.removeprefix("rgb(").rstrip(")").split(","))) < 200) is dark


def test_figures_are_shown_and_updated(server, tab):
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    assert text_of(tab, "drafter") == "ssd"
    complete(server, "def before(")
    before = eventually(lambda: text_of(tab, "per-step").strip("\N{EN DASH}"))
    # Once the corpus is refreshed, the same request is drafted and steps accept more tokens.
    eventually(lambda: complete(server, "def before(") and float(text_of(tab, "per-step")) > float(before))
    eventually(lambda: tab.run("return document.querySelectorAll('#bars rect').length") > 0)
    eventually(lambda: tab.run("return document.querySelector('#curve polyline')") is not None)
    eventually(lambda: (shown := figures(server))["running"] == 0 and corpus_of(tab) == shown["corpus"]["tokens"] > 60)
    shown = figures(server)
    drafted, accepted = (shown[name]["corpus"] for name in ("drafted_by_source", "accepted_by_source"))
    eventually(lambda: source_of(tab, "corpus") == (accepted, drafted, pytest.approx(accepted / drafted)))


def corpus_of(tab):
    """Return the number of tokens of the corpus that the page shows."""
    return (numbers_of(text_of(tab, "corpus")) or [None])[0]


def test_what_a_drafter_does_not_have_is_not_shown(server, tab):
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    # Shown and read at once, before the next update.
    *texts, points = tab.run("""
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


def test_an_answer_is_streamed_with_drafted_text_marked(server, tab):
    text = complete(server, "class Page(")
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)

    def marked():
        ask(tab, "class Page(")
        assert text_of(tab, "answer") == text
        return tab.run("return [...document.querySelectorAll('#answer mark')].map(mark => mark.textContent).join('')")

    eventually(lambda: len(text) / 2 < len(marked()) < len(text))  # On a busy machine drafting may not pay at first.
    assert "60 tokens in" in text_of(tab, "usage")


def test_errors_are_shown(server, tab):
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    ask(tab, "x", key="error")
    assert "give a valid key" in text_of(tab, "error")
    ask(tab, "x " * 5000)
    assert "shorten the prompt" in text_of(tab, "error")
    ask(tab, "def f(", tokens=5)
    assert text_of(tab, "error") == ""


def test_a_running_answer_can_be_stopped(server, tab):
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    for name, value in (("prompt", "def f("), ("key", KEY), ("tokens", 900), ("temperature", 1.5)):
        tab.run(f"document.getElementById({name!r}).value = {value!r}")
    tab.run("document.getElementById('submit').click()")
    eventually(lambda: text_of(tab, "answer"))
    tab.run("document.getElementById('stop').click()")
    eventually(lambda: text_of(tab, "state") == "")
    eventually(lambda: httpx.get(f"{server.url}/figures").json()["running"] == 0)


def test_an_unreachable_server_is_reported(server, tab):
    def set_reachable(is_reachable):
        conditions = {"offline": not is_reachable, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        tab.devtools("Network.emulateNetworkConditions", conditions)

    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    set_reachable(False)
    eventually(lambda: "no figures" in text_of(tab, "offline"))
    set_reachable(True)
    eventually(lambda: text_of(tab, "offline") == "")
