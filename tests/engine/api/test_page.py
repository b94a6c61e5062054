"""The status page in a real browser with a real server."""

import re
from itertools import count

import httpx
import pytest

from tests.browser import CHROMIUM, DRIVER, browser
from tests.engine.api.serving import MODEL, TIMEOUT_S, eventually, serving
from tests.servers import served

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
    complete(server, "def before(")
    before = eventually(lambda: text_of(tab, "per-step").strip("\N{EN DASH}"))
    # Once the corpus is refreshed, the same request is drafted and steps accept more tokens.
    eventually(lambda: complete(server, "def before(") and float(text_of(tab, "per-step")) > float(before))
    eventually(lambda: tab.run("return document.querySelectorAll('#bars rect').length") > 0)
    eventually(lambda: tab.run("return document.querySelector('#curve polyline')") is not None)


def test_the_size_of_the_corpus_is_shown(server, tab):
    def corpus_tokens():
        return figures(server)["corpus"]["tokens"]

    before = corpus_tokens()
    complete(server, "def grow(", ignore_eos=True)
    eventually(lambda: corpus_tokens() > before + 50)
    first = corpus_tokens()
    tab.show(server.url, 1100)
    eventually(lambda: numbers_of(text_of(tab, "corpus"))[:2] == [first, 16_000_000])
    complete(server, "def grow_more(", learn=False, ignore_eos=True)
    complete(server, "class Grow(", ignore_eos=True)
    eventually(lambda: first + 50 < numbers_of(text_of(tab, "corpus"))[0] < first + 70)
    points = tab.run("return document.querySelector('#growth .line').getAttribute('points').split(' ')")
    heights = [float(point.split(",")[1]) for point in points]
    assert heights == sorted(heights, reverse=True)  # y grows downwards
    assert heights[0] > heights[-1] == 4  # the top line


def test_acceptance_by_source(server, tab):
    sources, numbers = {"corpus", "local", "fallback"}, count()

    def are_drafted():
        complete(server, "def found(")  # from the corpus, the second time
        complete(server, f"x = [{', '.join([str(next(numbers))] * 7)},")  # from its own text
        shown = figures(server)
        return shown["accepted_by_source"]["corpus"] > 30 and all(shown["drafted_by_source"][name] for name in sources)

    eventually(are_drafted)  # On a busy machine drafting may not pay at first.
    tab.show(server.url, 1100)
    assert eventually(lambda: text_of(tab, "drafter")) == "ssd"
    eventually(lambda: figures(server)["running"] == 0)
    shown = figures(server)
    assert {name for name, drafted in shown["drafted_by_source"].items() if drafted} == sources
    for name in ("corpus", "local"):
        accepted, drafted = shown["accepted_by_source"][name], shown["drafted_by_source"][name]
        eventually(lambda: source_of(tab, name) == (accepted, drafted, pytest.approx(accepted / drafted)))  # noqa: B023
    assert sum(shown["drafted_by_source"].values()) == shown["drafted"]
    assert sum(shown["accepted_by_source"].values()) == shown["accepted"]


def test_a_drafter_without_a_corpus(server, tab):
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    # Shown and read at once, before the next update.
    texts = tab.run("""
        show({...previous, drafter: "ngram", corpus: null, drafted_by_source: {corpus: 0, local: 0}});
        const none = [$("corpus").textContent, $("sources").textContent, $("growth-plot").style.display];
        show({...previous, drafted_by_source: {corpus: 0, local: 200}, accepted_by_source: {corpus: 0, local: 50}});
        return [...none, $("sources").innerText.replaceAll("\\n", " ")];
    """)
    assert "ngram" in texts[0]
    assert "stores no finished requests" in texts[0]
    assert texts[1:3] == ["no drafts yet", "none"]
    assert texts[3] == "the request's own text 25 % 50 of 200"


def test_a_remote_drafter(tab, tmp_path):
    address = f"unix:{tmp_path}/drafter"
    with (
        served("--listen", address, "--capacity", "100k"),
        serving("--drafter", "ssd-remote", "--address", address) as server,
    ):
        complete(server, "def elsewhere(", ignore_eos=True)
        tab.show(server.url, 1100)
        eventually(lambda: text_of(tab, "corpus").startswith("60 sent from this engine to the drafter service"))
        # The service indexes asynchronously.
        eventually(
            lambda: complete(server, "def elsewhere(", learn=False) and figures(server)["accepted_by_source"]["corpus"]
        )
        eventually(lambda: source_of(tab, "corpus"))
        assert figures(server)["corpus"] is None


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
