"""The demonstration itself, short, on a tiny model: with the real sidecar, to its files."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from drafter_service.client import DrafterClient
from engine.commands import main as cli
from engine.commands.demo import run as demo_run
from engine.commands.demo.measure import Measurement
from engine.commands.demo.summary import summarise
from ssd.types import DraftBatch
from tests.engine.conftest import make_folder


def measurement(**changes):
    fields = {
        "kind": "new",
        "source": "a.py:f:1",
        "prompt_tokens": 10,
        "output_tokens": 100,
        "corpus_tokens": 0,
        "plain_s": 1.0,
        "drafted_s": 0.5,
        "steps": 50,
        "drafted": 80,
        "accepted": 50,
        "identical": True,
        "loop_tokens": 20,
    }
    return Measurement(**{**fields, **changes})


def test_figures_are_those_of_the_measurements():
    measurements = [measurement(corpus_tokens=100 * index) for index in range(18)]
    measurements += [measurement(kind="exact repeat", drafted_s=0.25, steps=10), measurement(corpus_tokens=1900)]
    summary = summarise(measurements)
    assert summary.identical
    assert len(summary.tenths) == 10
    assert summary.last_tenth.requests == 2
    assert summary.last_tenth.speedup == pytest.approx(2.0 / 0.75)
    assert summary.last_tenth.tokens_per_step == pytest.approx(200 / 60)
    assert summary.last_tenth_new.speedup == pytest.approx(2.0)
    assert summary.whole.acceptance == pytest.approx(50 / 80)
    assert summary.loop_share == pytest.approx(0.2)
    assert summary.last_tenth.repeat_share == pytest.approx(0.5)
    assert {kind: part.requests for kind, part in summary.kinds.items()} == {"new": 19, "exact repeat": 1}


def test_one_differing_output_is_reported():
    measurements = [measurement(identical=index != 7) for index in range(20)]
    summary = summarise(measurements)
    assert not summary.identical
    assert summary.differing == (7,)


@pytest.fixture(scope="module")
def model_with_prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_folder(folder)
    prompts = [{"source": f"a.py:f{n}:1", "prompt": f"def f{n}(left, right):\n    return left\n"} for n in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture(scope="module", autouse=True)
def quick_refresh():
    """What was learned is draftable at once: the whole of it may take no longer than the usual interval."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_run, "SIDECAR_OPTIONS", (*demo_run.SIDECAR_OPTIONS, "--refresh-interval", "0.001"))
        yield


def run_demo(model, out, *more):
    """Runs a short demonstration into `out`; gives its exit code."""
    arguments = ("demo", "--model", model, "--out", out, "--requests", 20, "--max-tokens", 24, *more)
    argv, sys.argv = sys.argv, ["ssd-engine", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = argv
    return ended.value.code or 0


@pytest.fixture(scope="module")
def demo(model_with_prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    return out, run_demo(model_with_prompts, out)


def test_the_run_is_written_with_every_figure(demo):
    out, code = demo
    run = json.loads((out / "run.json").read_text())
    assert code == 0
    assert run["identical"] is True
    for figure in ("speedup_last_tenth", "tokens_per_step_last_tenth", "loop_share"):
        assert run[figure] >= 0
    assert {"speedup_last_tenth_new", "tokens_per_step_last_tenth_new", "versions", "settings"} <= set(run)
    assert len(run["requests"]) == 20
    assert len(run["tenths"]) == 10
    assert {kind: part["requests"] for kind, part in run["kinds"].items()} == {
        "new": 8,
        "near repeat": 6,
        "exact repeat": 6,
    }
    repeats = [request for request in run["requests"] if request["kind"] == "exact repeat"]
    assert sum(r["output_tokens"] for r in repeats) > 2 * sum(r["steps"] for r in repeats)


def test_the_page_stands_alone(demo):
    out, _ = demo
    page = (out / "run.html").read_text()

    class Checker(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []
            self.circles = 0

        def handle_starttag(self, tag, attributes):
            self.circles += tag == "circle"
            assert not {"src", "href"} & {name for name, _ in attributes}
            if tag not in ("meta",):
                self.open.append(tag)

        def handle_startendtag(self, tag, attributes):
            self.circles += tag == "circle"

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.circles == 20
    assert not re.search(r"https?://|@import|url\(", page)
    assert "tokens/s" in page


def test_sampled_outputs_are_identical_too_and_exact_repeats_are_draftable(model_with_prompts, tmp_path):
    assert run_demo(model_with_prompts, tmp_path, "--temperature", 0.5) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["identical"] is True
    assert run["settings"]["temperature"] == 0.5
    repeats = [request for request in run["requests"] if request["kind"] == "exact repeat"]
    assert sum(r["output_tokens"] for r in repeats) > 2 * sum(r["steps"] for r in repeats)


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(model_with_prompts, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "out" / "run.json").mkdir(parents=True)
    for out in (tmp_path / "file" / "out", tmp_path / "out"):
        assert run_demo(model_with_prompts, out) == 2
        printed = capsys.readouterr()
        assert "cannot write to" in printed.err
        assert printed.out == ""


def test_a_sidecar_that_dies_is_no_result(model_with_prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(DrafterClient, "draft", lambda client, progress: lose(client, progress))

    def lose(client, progress):
        client._link.lost = "killed"
        return DraftBatch.empty(len(progress.sequence_ids))

    assert run_demo(model_with_prompts, tmp_path) == 2
    assert "the sidecar went away in mid-run (killed)" in capsys.readouterr().err
    assert (tmp_path / "run.json").read_text() == ""
