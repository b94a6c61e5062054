"""The commands `compare` and `profile`, from arguments to files."""

import itertools
import json
import re
import signal
from dataclasses import replace

import pytest

from engine.commands.compare import trial
from engine.commands.compare.page import COLUMNS, NOTES, WIDE, WIDE_ONLY, notes, table_of
from engine.commands.compare.results import Comparison, Condition, Figures, Result
from engine.commands.compare.rows import Row
from engine.engine import Engine
from engine.speculation import verify
from ssd.budget.cost_profile import CostProfile
from tests.browser import page_faults
from tests.engine.steps import accepting
from tests.markup import tags_of

FIELDS = {
    "drafter", "verification", "temperature", "K", "concurrency", "tokens_per_step", "tokens_per_step_no_loops",
    "drafted_per_step", "accept_by_position", "identical", "speedup", "speedup_range", "prompts",
}  # fmt: skip
NAMES = ["left", "right", "pair", "add"]
PROMPTS = [f"def {name}(left, right):\n    return left + right\n\ndef {name}" for name in NAMES]


@pytest.fixture
def chosen(model_folder, draft_folders):
    """Return the arguments that select the model, and weights of the drafters that are compared."""

    def chosen(drafter):
        kinds = [kind for kind in ("mtp", "medusa") if kind in drafter]
        weights = [("--draft-model", f"{kind}={draft_folders[kind]}") for kind in kinds]
        return ("--model", model_folder, "--drafter", drafter, *sum(weights, ()))

    return chosen


@pytest.fixture
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture(autouse=True)
def short_pauses_and_wide_tables(monkeypatch):
    monkeypatch.setattr(trial, "INDEXING_S", 0.01)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def compare(run, chosen, prompts):
    """Compare drafters on the tiny model with short outputs."""

    def compare(out, *more, drafter="mtp,medusa"):
        return run("compare", *chosen(drafter), "--prompts", prompts, "--out", out, "--max-tokens", 12, *more)

    return compare


def read(out):
    return json.loads((out / "compare.json").read_text())


def test_every_figure_is_reported(compare, tmp_path):
    options = ("--warm", 1, "--requests", 1, "--verification", "exact,rejection", "--depth", "3", "--gpu", "h100")
    code, out, err = compare(tmp_path, *options, "--max-draft", 6, drafter="mtp,ngram,ssd+mtp,eagle")
    assert (code, err) == (0, "")
    document = read(tmp_path)
    results = document["results"]
    assert all(set(result) >= FIELDS for result in results)
    names = ["none", "mtp", "ngram", "ssd+mtp"]
    expected = [(0.0, "exact", name) for name in names] + [(0.8, "exact", name) for name in names]
    expected += [(0.8, "rejection", name) for name in ("none", "mtp")]
    assert [(r["temperature"], r["verification"], r["drafter"]) for r in results] == expected
    for result in results:
        assert result["identical"] is (None if result["verification"] == "rejection" else True)
        assert result["tokens_per_step"] == pytest.approx(1 + sum(result["accept_by_position"]))
        assert result["drafted_per_step"] == pytest.approx(sum(result["drafted_by_position"]))
        assert (result["tokens_per_step_no_loops"] is None) == (result["temperature"] > 0)
        assert result["speedup"] > 0
        assert result["predicted_speedup"] > 0
        if result["drafter"] == "mtp":
            assert (result["K"], result["draft_shape"], result["drafted_per_step"]) == (3, "path", 3)
            assert 0 <= result["best_K"] <= 3
        if result["drafter"] == "none":
            assert (result["tokens_per_step"], result["speedup"], result["drafted_per_step"]) == (1, 1, 0)
    assert list(document["skipped"]) == ["eagle"]
    for words in ("temperature 0.8, rejection", "ssd+mtp", "no weights", document["recommendation"]):
        assert words in out
    table = (tmp_path / "compare.md").read_text()
    assert f"| mtp | 3 | path | {results[1]['tokens_per_step']:.2f} |" in table
    assert page_faults(tmp_path / "compare.html") == []
    assert tags_of((tmp_path / "compare.html").read_text())["td"] >= 8 * len(results)


def test_only_the_columns_that_are_shown_are_explained():
    comparison = comparison_of(result())
    [condition] = comparison.tables
    for width, hidden in ((80, WIDE_ONLY), (WIDE, ())):
        headings = set(table_of(comparison, condition, width)[0])
        assert not headings & set(hidden)
        explained = {note.partition(":")[0] for note in notes(comparison, width)}
        assert explained & set(COLUMNS) == headings & set(NOTES)
    assert {"K", "best K", *WIDE_ONLY} - {"shape"} <= explained


def test_outputs_that_differ_are_reported(compare, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "accept_exactly", accepting(lambda draft, *_: range(len(draft))))
    monkeypatch.setattr("engine.commands.compare.results.MIN_PROMPTS", 1)
    code, out, _ = compare(tmp_path, "--requests", 1, "--temperature", 0, drafter="mtp")
    assert code == 1
    assert "DIFFERENT" in out
    none, mtp = read(tmp_path)["results"]
    assert none["identical"] is True
    assert mtp["identical"] is False
    assert "none is recommended" in read(tmp_path)["recommendation"]


def result(name="mtp", *, prompts=10, speedup=1.5, identical=True, verification="exact", concurrency=1):
    condition, row = Condition(verification, 0.0, concurrency), Row(name, name, {}, 2, name == "mtp", "path")
    figures = Figures(2.0, 1.5, 2.0, [0.6, 0.4], [1.0, 1.0])
    return Result(row, condition, figures, identical, 1.0, 0.1, 50.0, speedup, (1.4, 1.6), prompts)


def comparison_of(*results, **more):
    settings = {"max_draft": 2, "earlier_requests": 0}
    return Comparison(settings, CostProfile("cpu", "tiny", {1: {1: 1.0}}), results=results, **more)


@pytest.mark.parametrize(
    ("results", "recommendation"),
    [
        ([result(prompts=9)], "No recommendation: it takes at least 10 prompts; the speed was measured with 9"),
        ([result()], "Use mtp with a depth of 2: 1.50x the tokens/s of none, geometric mean over 1 condition"),
        ([result(), result("ngram", speedup=2.0)], "Use ngram: 2.00x"),
        ([result(), result(concurrency=2), result("ngram", speedup=2.0)], "Use mtp with a depth of 2: 1.50x"),
        ([result(speedup=1.2), result(speedup=1.8, concurrency=2)], "Use mtp with a depth of 2: 1.47x"),
        ([result(), result("ngram", speedup=2.0, prompts=9)], "Use mtp with a depth of 2: 1.50x"),
        ([result(speedup=1.04), result("none", speedup=2.0)], "Do not draft here: the best drafter, mtp with a depth"),
        ([result(identical=False), result(verification="rejection"), result(speedup=None)], "No drafter was measured"),
    ],
)
def test_the_drafter_that_is_fastest_under_most_conditions_is_recommended(results, recommendation):
    assert comparison_of(*results).recommendation().startswith(recommendation)
    assert comparison_of(*results, conclusion="as it is").recommendation() == "as it is"


@pytest.mark.parametrize(("ends", "doubt"), [((1.4, 1.6), ""), ((0.9, 1.5), "0.90x to 1.50x"), ((1.1, 2.3), "1.10x")])
def test_a_wide_range_of_rounds_is_part_of_the_recommendation(ends, doubt):
    found = comparison_of(replace(result(), speedup_range=ends)).recommendation()
    assert doubt in found
    assert ("But its rounds gave" in found) is bool(doubt)


def test_the_range_of_rounds_is_shown(run, chosen, tmp_path):
    (tmp_path / "prompts.txt").write_text("".join(f"def f{number}(left):\n" for number in range(9)))
    arguments = ("--prompts", tmp_path / "prompts.txt", "--out", tmp_path, "--max-tokens", 3, "--temperature", 0)
    code, out, _ = run("compare", *chosen("ngram"), *arguments)
    assert code == 0
    document = read(tmp_path)
    assert document["recommendation"] in out
    assert out.startswith("note: a recommendation takes at least 10 prompts; there will be none from 9\n")
    ngram = document["results"][1]
    low, high = ngram["speedup_range"]
    assert low <= ngram["speedup"] <= high
    assert f"{low:.2f}-{high:.2f}" in out
    assert (ngram["prompts"], document["partial"]) == (9, "")
    assert re.search(r"^36 outputs of 3 tokens: about 2 min\.", out, re.MULTILINE)


def test_an_interrupted_comparison_keeps_its_results(compare, tmp_path, monkeypatch):
    generate, groups = Engine.generate, itertools.count()

    def generate_or_stop(engine, *arguments):
        if next(groups) == 4:  # in the second round of the second condition
            signal.raise_signal(signal.SIGTERM)
        return generate(engine, *arguments)

    monkeypatch.setattr(Engine, "generate", generate_or_stop)
    code, out, _ = compare(tmp_path, "--requests", 2, "--concurrency", "2,1", "--temperature", 0, drafter="mtp")
    assert code == 128 + signal.SIGTERM
    document = read(tmp_path)
    assert document["partial"] == "Partial: it was interrupted after 14 of 16 outputs"
    assert [(result["concurrency"], result["prompts"]) for result in document["results"]] == [
        (2, 2), (2, 2), (1, 1), (1, 1),
    ]  # fmt: skip
    for text in (out, (tmp_path / "compare.html").read_text(), (tmp_path / "compare.md").read_text()):
        assert document["partial"] in text


def test_results_are_written_while_a_comparison_runs(compare, tmp_path, monkeypatch):
    seen, generate = [], Engine.generate

    def generate_and_read(engine, *arguments):
        seen.append(read(tmp_path))
        return generate(engine, *arguments)

    monkeypatch.setattr(Engine, "generate", generate_and_read)
    assert compare(tmp_path, "--requests", 1, "--temperature", 0)[0] == 0
    rows = seen[0]["results"]
    assert [(row["drafter"], row["speedup"]) for row in rows] == [("none", None), ("mtp", None), ("medusa", None)]
    assert rows[1]["tokens_per_step"] == read(tmp_path)["results"][1]["tokens_per_step"]
    assert seen[0]["partial"] == "Partial: 3 of 6 outputs"


def test_requests_run_at_the_same_time(compare, tmp_path):
    options = ("--requests", 3, "--temperature", 0.5, "--concurrency", "1,2")
    assert compare(tmp_path, *options)[0] == 0
    results = read(tmp_path)["results"]
    alone, together = ([r for r in results if r["concurrency"] == n] for n in (1, 2))
    assert all(result["identical"] for result in results)
    # Drafts of paths do not depend on the other sequences of a batch.
    assert [r["accept_by_position"] for r in alone[:2]] == [r["accept_by_position"] for r in together[:2]]


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        ("mtp", "--depth 0", "--depth must be numbers from 1"),
        ("mtp", "--chat", "has no chat template; leave --chat out"),
        ("mtp", "--temperature 0,hot", "--temperature must be numbers from 0"),
        ("mtp", "--verification maybe", "--verification must be exact or rejection"),
        ("mtp", "--gpu abacus", "--gpu abacus: unknown; give l4,"),
        ("mtp", "--gpu h100 --model-size 2t", "--model-size 2t: unknown"),
        ("mtp", "--gpu h100 --cost-profile x", "not both"),
        ("mtp", "--cost-profile /no/file", "cannot read /no/file"),
        ("mtp", "--warm 9", "has 4 prompts, but 9 earlier"),
        ("mtp", "--requests 5", "but 0 earlier and 5 measured"),
        ("mtp", "--prompts /no/file", "cannot read /no/file"),
        (
            "mtp",
            "--prompts {tmp}/empty.jsonl",
            'has no prompt; write a prompt on each line, in a .jsonl file as {"prompt": ',
        ),
        ("mtp", "--prompts {tmp}/long.txt", "error: prompt 2: the prompt has"),
        ("mtp", "--draft-model mtp=/no/folder", "/no/folder"),
        ("mtp,medusa", "--draft-model eagle=/no/folder", "does not fit --drafter mtp+medusa"),
        ("mtp", "--out /proc/none", "cannot write to /proc/none"),
        ("magic", "--requests 1", "unknown drafter 'magic'"),
        ("none", "--requests 1", "--drafter none: give at least one"),
        ("eagle", "--requests 1", "no drafter could be measured: eagle: no weights"),
        ("mtp", "--requests 1 --time-limit 0.0001", "Partial: it reached its limit of 0.0001 minutes after 0 of"),
    ],
)
def test_bad_input_is_one_line(compare, tmp_path, drafter, options, message):
    (tmp_path / "long.txt").write_text(f"fine\n{'long ' * 600}\n")
    (tmp_path / "empty.jsonl").touch()
    code, _, err = compare(tmp_path, *options.format(tmp=tmp_path).split(), drafter=drafter)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_models_without_prompts_need_a_file(run, chosen, tmp_path):
    code, _, err = run("compare", *chosen("mtp"), "--out", tmp_path)
    assert code == 2
    assert 'has no prompts.jsonl; give --prompts FILE with a prompt on each line, in a .jsonl file as {"prompt"' in err


def test_a_measured_profile_is_written_and_used(run, compare, chosen, tmp_path, monkeypatch):
    monkeypatch.undo()  # Steps are measured.
    path = tmp_path / "profile.json"
    options = ("--depth", "1,3", "--concurrency", "1,2", "--max-draft", 4)
    code, out, err = run("profile", *chosen("mtp,medusa,ngram,eagle"), *options, "--out", path)
    assert (code, err) == (0, "")
    assert "eagle is skipped: no weights" in out
    profile = CostProfile.read(path)
    assert (profile.model, profile.source) == ("tiny", "measured")
    sizes = {size: sorted(row) for size, row in profile.step_ms.items()}
    assert sizes == {1: [1], 2: [1, 2], 4: [1, 2], 8: [2], 10: [2]}
    assert {name: sorted(table) for name, table in profile.drafter_ms.items()} == {
        "mtp": [1, 3], "medusa": [1, 3], "ngram": [0],
    }  # fmt: skip
    assert all(set(row) == {1, 2} and min(row.values()) > 0 for row in profile.drafter_ms["mtp"].values())
    code, out, _ = compare(tmp_path / "out", "--requests", 1, "--temperature", 0, "--cost-profile", path)
    assert code == 0
    document = read(tmp_path / "out")
    assert document["predicted_for"]["device"] == profile.device
    [mtp] = [result for result in document["results"] if result["drafter"] == "mtp"]
    expected = profile.speedup(mtp["tokens_per_step"], 4, profile.drafting("mtp", 4, 1), 1)
    assert mtp["predicted_speedup"] == pytest.approx(expected)
    assert "tiny on" in out
