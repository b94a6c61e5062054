"""The page in a real browser, against a real server."""

import re
import time

import httpx
import pytest

from tests.browser import CHROMIUM, DRIVER, browser
from tests.engine.api.serving import MODEL, TIMEOUT_S, serving
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


def eventually(condition):
    until = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.02)
    return value


def ask(tab, prompt, *, key=KEY, tokens=60):
    """Fill the form, send it, and wait until the answer has ended."""
    for name, value in (("prompt", prompt), ("key", key), ("tokens", tokens), ("heat", 0)):
        tab.run(f"document.getElementById({name!r}).value = {value!r}")
    tab.run("document.getElementById('go').click()")
    eventually(lambda: tab.run("return document.getElementById('state').textContent === ''"))


def numbers_of(text):
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", text)]


def figures(server):
    return httpx.get(f"{server.url}/figures").json()


def source_of(tab, name):
    """Of the tokens found there: how many were accepted, how many were drafted, and the bar's part that is full."""
    row = f"document.getElementById('source-{name}')"
    counts = tab.run(f"return {row}?.querySelector('small').textContent ?? ''")
    part = tab.run(f"return {row}?.querySelector('i').style.getPropertyValue('--part') ?? ''")
    return (*numbers_of(counts), float(part)) if counts else None


def complete(server, prompt, **more):
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 60, "temperature": 0} | more
    answer = httpx.post(
        f"{server.url}/v1/completions", json=asked, headers={"Authorization": f"Bearer {KEY}"}, timeout=TIMEOUT_S
    )
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (1100, True), (380, False)])
def test_it_fits_says_nothing_wrong_and_asks_nobody_else(server, tab, width, dark):
    said, asked = tab.show(server.url, width, dark=dark)
    assert said == []
    assert all(address.startswith(server.url) for address in asked)
    assert tab.run("return document.documentElement.scrollWidth") <= width
    shade = tab.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, shade.removeprefix("rgb(").rstrip(")").split(","))) < 200) is dark


def test_figures_appear_and_change(server, tab):
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    complete(server, "def before(")
    before = eventually(lambda: text_of(tab, "perstep").strip("\N{EN DASH}"))
    complete(server, "def before(")  # drafted now, so that steps bear more
    eventually(lambda: float(text_of(tab, "perstep")) > float(before))
    eventually(lambda: tab.run("return document.querySelectorAll('#bars rect').length") > 0)
    eventually(lambda: tab.run("return document.querySelector('#curve polyline')") is not None)


def test_the_corpus_grows_and_the_page_was_not_there(server, tab):
    def remembered():
        return figures(server)["corpus"]["tokens"]

    before = remembered()
    complete(server, "def grow(", ignore_eos=True)
    eventually(lambda: remembered() > before + 50)
    first = remembered()
    tab.show(server.url, 1100)
    eventually(lambda: numbers_of(text_of(tab, "corpus"))[:2] == [first, 16_000_000])
    assert "top line" in text_of(tab, "corpus")
    rises = "return document.querySelector('#growth .curve').getAttribute('d').split('V').map(parseFloat)"
    heights = tab.run(rises)[1:]
    assert heights == sorted(heights, reverse=True)  # upwards
    assert heights[-1] == 4  # the top line
    complete(server, "def grow_more(", learn=False, ignore_eos=True)
    complete(server, "class Grow(", ignore_eos=True)
    eventually(lambda: first + 50 < numbers_of(text_of(tab, "corpus"))[0] < first + 70)


def test_acceptance_by_where_drafts_were_found(server, tab):
    complete(server, "def found(")
    complete(server, "def found(")  # from the corpus
    complete(server, "x = [1, 1, 1, 1, 1, 1, 1,")  # from itself
    tab.show(server.url, 1100)
    assert eventually(lambda: text_of(tab, "drafter")) == "ssd"
    eventually(lambda: figures(server)["running"] == 0)
    shown = eventually(lambda: all(figures(server)["drafted_from"].values()) and figures(server))
    for name in ("corpus", "local"):
        accepted, drafted = shown["accepted_from"][name], shown["drafted_from"][name]
        eventually(lambda: source_of(tab, name) == (accepted, drafted, pytest.approx(accepted / drafted)))  # noqa: B023
    assert sum(shown["drafted_from"].values()) == shown["drafted"]
    assert sum(shown["accepted_from"].values()) == shown["accepted"]
    assert shown["accepted_from"]["corpus"] > 30


def test_a_drafter_that_remembers_nothing(server, tab):
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    # Shown and read at once, before the next figures come.
    said = tab.run("""
        show({...before, drafter: "ngram", corpus: null, drafted_from: {corpus: 0, local: 0}});
        const none = [$("corpus").textContent, $("sources").textContent, $("growth").style.display];
        show({...before, drafted_from: {corpus: 0, local: 200}, accepted_from: {corpus: 0, local: 50}});
        return [...none, $("sources").innerText.replaceAll("\\n", " ")];
    """)
    assert "ngram" in said[0]
    assert "remembers nothing of finished requests" in said[0]
    assert said[1:3] == ["no drafts yet", "none"]
    assert said[3] == "the request's own text 25 % 50 of 200"


def test_a_drafter_that_remembers_elsewhere(tab, tmp_path):
    address = f"unix:{tmp_path}/drafter"
    with (
        served("--listen", address, "--capacity", "100k"),
        serving("--drafter", "ssd-remote", "--address", address) as server,
    ):
        complete(server, "def elsewhere(", ignore_eos=True)
        tab.show(server.url, 1100)
        eventually(
            lambda: text_of(tab, "corpus").startswith("60 given to the drafter's service from here, which alone")
        )
        # The service learns in its own time.
        eventually(
            lambda: complete(server, "def elsewhere(", learn=False) and figures(server)["accepted_from"]["corpus"]
        )
        eventually(lambda: source_of(tab, "corpus"))
        assert figures(server)["corpus"] is None


def test_an_answer_streams_and_what_was_drafted_is_marked(server, tab):
    text = complete(server, "class Page(")
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    ask(tab, "class Page(")
    assert text_of(tab, "answer") == text
    marked = tab.run("return [...document.querySelectorAll('#answer mark')].map(mark => mark.textContent).join('')")
    assert len(marked) > len(text) / 2
    assert len(marked) < len(text)
    assert "60 tokens in" in text_of(tab, "worth")


def test_what_goes_wrong_is_said(server, tab):
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    ask(tab, "x", key="wrong")
    assert "give a valid key" in text_of(tab, "wrong")
    ask(tab, "x " * 5000)
    assert "shorten the prompt" in text_of(tab, "wrong")
    ask(tab, "def f(", tokens=5)
    assert text_of(tab, "wrong") == ""


def test_a_running_answer_can_be_stopped(server, tab):
    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    for name, value in (("prompt", "def f("), ("key", KEY), ("tokens", 900), ("heat", 1.5)):
        tab.run(f"document.getElementById({name!r}).value = {value!r}")
    tab.run("document.getElementById('go').click()")
    eventually(lambda: text_of(tab, "answer"))
    tab.run("document.getElementById('halt').click()")
    eventually(lambda: text_of(tab, "state") == "")
    eventually(lambda: httpx.get(f"{server.url}/figures").json()["running"] == 0)


def test_a_server_out_of_reach_is_said_to_be(server, tab):
    def reach(is_there):
        conditions = {"offline": not is_there, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        tab.devtools("Network.emulateNetworkConditions", conditions)

    tab.show(server.url, 1100)
    eventually(lambda: text_of(tab, "model") == MODEL)
    reach(False)
    eventually(lambda: "no figures" in text_of(tab, "trouble"))
    reach(True)
    eventually(lambda: text_of(tab, "trouble") == "")
