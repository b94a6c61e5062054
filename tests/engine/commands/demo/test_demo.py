"""A short demonstration with a tiny model and the real sidecar, up to the files that it writes."""

import json
import sys

import pytest

from drafter_service.client import DrafterClient
from engine.commands import main as cli
from engine.commands.demo import command
from engine.commands.demo.measure import Measurement, summarize
from engine.commands.demo.workload import make_workload
from ssd.types import DraftBatch
from tests.browser import page_faults
from tests.engine.conftest import make_folder
from tests.markup import tags_of


def measurement(**changes):
    fields = {
        "kind": "new",
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


def test_the_summary_adds_up_measurements():
    measurements = [measurement(corpus_tokens=100 * index) for index in range(18)]
    measurements += [measurement(kind="exact repeat", drafted_s=0.25, steps=10), measurement(corpus_tokens=1900)]
    summary = summarize(measurements)
    assert summary.identical
    assert len(summary.tenths) == 10
    last = summary.tenths[-1]
    assert (last.requests, last.new) == (2, 1)
    assert last.speedup == pytest.approx(2.0 / 0.75)
    assert last.tokens_per_step == pytest.approx(200 / 60)
    assert summary.whole.speedup == pytest.approx(20 / (19 * 0.5 + 0.25))
    assert summary.kinds["new"].speedup == pytest.approx(2.0)
    assert summary.whole.acceptance == pytest.approx(50 / 80)
    assert summary.loop_share == pytest.approx(0.2)
    assert {kind: part.requests for kind, part in summary.kinds.items()} == {"new": 19, "exact repeat": 1}


def test_one_differing_output_is_reported():
    measurements = [measurement(identical=index != 7) for index in range(20)]
    summary = summarize(measurements)
    assert not summary.identical
    assert summary.differing == (7,)


@pytest.mark.parametrize(
    ("seconds", "prompts", "expected"), [(0.1, 200, 300), (1.0, 200, 150), (60.0, 200, 120), (0.1, 10, 25)]
)
def test_the_number_of_requests_depends_on_the_time_per_request(seconds, prompts, expected):
    count = command.choose_requests(seconds, prompts)
    assert count == expected
    make_workload([f"def f{number}():" for number in range(prompts)], count, 0)  # raises if there are too few prompts


@pytest.fixture(scope="module")
def model_with_prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_folder(folder, num_hidden_layers=1)
    prompts = [{"prompt": f"x{n} = [\n    left, right, {n}\n"} for n in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture(scope="module", autouse=True)
def short_run():
    """Probe with one request, and refresh the corpus at once: the run is shorter than the default interval.

    Drafts come in time on busy machines, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "PROBE_REQUESTS", 1)
        patch.setattr(command, "STEP_DEADLINE_S", 30.0)
        patch.setattr(
            command, "SIDECAR_OPTIONS", (*command.SIDECAR_OPTIONS, "--set", "drafting.refresh_interval_s=0.001")
        )
        yield


def run_demo(model, out, *more):
    """Run a short demonstration into `out` and return its exit code."""
    arguments = ("demo", "--model", model, "--out", out, "--requests", 10, "--max-tokens", 16, *more)
    argv, sys.argv = sys.argv, ["ssd-engine", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = argv
    return ended.value.code or 0


@pytest.fixture(scope="module")
def demo(model_with_prompts, tmp_path_factory):
    """Run a demonstration with sampling and return its folder and its exit code."""
    out = tmp_path_factory.mktemp("demo") / "out"
    return out, run_demo(model_with_prompts, out, "--temperature", 0.5)


def test_sampled_outputs_are_identical_and_run_json_has_every_figure(demo):
    out, code = demo
    run = json.loads((out / "run.json").read_text())
    assert code == 0
    assert run["settings"]["temperature"] == 0.5
    assert run["identical"] is True
    for part in (run["whole"], run["kinds"]["new"]):
        assert part["speedup"] > 0
        assert part["tokens_per_step"] >= 1
    assert run["loop_share"] >= 0
    assert {"versions", "settings"} <= set(run)
    assert len(run["requests"]) == len(run["tenths"]) == 10
    assert {kind: part["requests"] for kind, part in run["kinds"].items()} == {
        "new": 4,
        "near repeat": 3,
        "exact repeat": 3,
    }


def test_exact_repeats_are_drafted(demo):
    run = json.loads((demo[0] / "run.json").read_text())
    repeats = [request for request in run["requests"] if request["kind"] == "exact repeat"]
    assert sum(r["output_tokens"] for r in repeats) > 2 * sum(r["steps"] for r in repeats)


def test_the_page_is_self_contained(demo):
    out, _ = demo
    page = (out / "run.html").read_text()
    assert page_faults(out / "run.html") == []
    assert tags_of(page)["circle"] == 2 * 10  # for wide and narrow screens
    assert "tokens/s" in page


def test_a_folder_that_cannot_be_written_is_reported_first(model_with_prompts, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "out" / "run.json").mkdir(parents=True)
    for out in (tmp_path / "file" / "out", tmp_path / "out"):
        assert run_demo(model_with_prompts, out) == 2
        printed = capsys.readouterr()
        assert "cannot write to" in printed.err
        assert printed.out == ""


def test_a_lost_sidecar_is_an_error(model_with_prompts, tmp_path, capsys, monkeypatch):
    def lose(client, progress):
        monkeypatch.setattr(DrafterClient, "lost", "killed")
        return DraftBatch.empty(len(progress.sequence_ids))

    monkeypatch.setattr(DrafterClient, "draft", lose)

    assert run_demo(model_with_prompts, tmp_path) == 2
    assert "the sidecar was lost during the run (killed)" in capsys.readouterr().err
    assert not (tmp_path / "run.json").exists()
