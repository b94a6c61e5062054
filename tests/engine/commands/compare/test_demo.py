"""A short demonstration with a tiny model and the real sidecar, up to the files that it writes."""

import json
import os
import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from engine.commands import main as cli
from engine.commands.compare import demo as command
from engine.commands.compare.demo import Round, comparison_of
from engine.commands.compare.results import Condition
from engine.commands.compare.trial import Turn
from engine.commands.compare.workload import TASKS_FILE, WorkItem, make_tasks
from engine.models.tokenizer import ChatPrompts, Tokenizer
from engine.scheduling.request import Completion, FinishReason
from tests.browser import page_faults
from tests.engine.conftest import make_folder
from tests.markup import tags_of

TOKENS = np.array([*range(80), *[7] * 20], np.uint32)


def turn(wall_s, steps, drafted=0, accepted=0, tokens=TOKENS):
    return Turn([Completion(tokens, FinishReason.LENGTH, steps, drafted, accepted)], wall_s)


def rounds_of(*kinds, drafted_s=0.5, steps=50, tokens=TOKENS):
    return [Round(WorkItem(kind, "", 0), turn(1.0, 100), turn(drafted_s, steps, 80, 50, tokens)) for kind in kinds]


def compared(rounds):
    """Return the comparison of some rounds, and its results by their names."""
    comparison = comparison_of(rounds, Condition("exact", 0.0, 1), {})
    return comparison, {each.row.name: each for each in comparison.results}


def test_results_are_totals_of_kinds_and_tenths():
    comparison, results = compared(
        [*rounds_of(*["new"] * 18), *rounds_of("exact repeat", drafted_s=0.25, steps=10), *rounds_of("new")]
    )
    assert {name: each.prompts for name, each in list(results.items())[:3]} == {"all": 20, "new": 19, "exact repeat": 1}
    assert results["all"].speedup == pytest.approx(20 / (19 * 0.5 + 0.25))
    new = results["new"]
    assert (new.speedup, new.figures.tokens_per_step, new.figures.drafted_per_step) == (2.0, 2.0, 1.6)
    assert results["all"].tokens_per_s == pytest.approx(2000 / 9.75)
    assert [each.prompts for each in comparison.results[3:]] == [2] * 10
    assert results["requests 19 to 20"].figures.tokens_per_step == pytest.approx(200 / 60)
    assert comparison.is_exact
    assert "19% of the output tokens are part of loops" in comparison.notes[-1]
    assert comparison.recommendation().startswith("2.05x the tokens/s of none over 20 requests, 2.00x over the 19 new")


def test_a_differing_output_is_reported():
    rounds = rounds_of(*["new"] * 10)
    rounds[7] = rounds_of("new", tokens=TOKENS[:-1])[0]
    comparison, results = compared(rounds)
    assert [name for name, each in results.items() if not each.identical] == ["all", "new", "requests 8 to 8"]
    assert comparison.notes[-1] == "Outputs differ in requests 8."


@pytest.fixture(scope="module")
def model_with_prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_folder(folder, num_hidden_layers=1)
    prompts = [{"prompt": f"x{n} = [\n    left, right, {n}\n"} for n in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture(scope="module", autouse=True)
def short_run():
    """Refresh the corpus at once, since the run is shorter than the default interval.

    Drafts come in time on busy machines, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(command.DRAFTER.options, "deadline_s", "30")
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
    assert (run["settings"]["temperature"], run["settings"]["drafter"]) == (0.5, "ssd-remote")
    assert {"versions", "recommendation"} <= set(run)
    for result in run["results"]:
        assert result["identical"] is True
        assert result["speedup"] > 0
        assert result["tokens_per_step"] >= 1
    counts = {result["drafter"]: result["prompts"] for result in run["results"][:4]}
    assert counts == {"all": 10, "new": 4, "near repeat": 3, "exact repeat": 3}
    assert len(run["results"]) == 4 + 10
    [repeats] = [result for result in run["results"] if result["drafter"] == "exact repeat"]
    assert repeats["tokens_per_step"] > 2  # They are drafted.


def test_the_page_is_self_contained(demo):
    out, _ = demo
    page = (out / "run.html").read_text()
    assert page_faults(out / "run.html") == []
    assert tags_of(page)["tr"] == 2 + 4 + 10
    for note in ("30% exact repeats, 30% near repeats", "% of the output tokens are part of loops"):
        assert note in page
    assert "| exact repeat |" in (out / "run.md").read_text()


def test_a_folder_that_cannot_be_written_is_reported_first(model_with_prompts, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "out" / "run.json").mkdir(parents=True)
    for out in (tmp_path / "file" / "out", tmp_path / "out"):
        assert run_demo(model_with_prompts, out) == 2
        printed = capsys.readouterr()
        assert "cannot write to" in printed.err
        assert printed.out == ""


def test_a_lost_sidecar_is_an_error(model_with_prompts, tmp_path, capsys, monkeypatch):
    @contextmanager
    def killed(*options):
        with running_sidecar(*options) as sidecar:
            monkeypatch.setattr(command, "alternated", lambda *arguments: kill(sidecar.pid, *arguments))
            yield sidecar

    def kill(pid, *arguments):
        os.kill(pid, signal.SIGKILL)
        return alternated(*arguments)

    alternated, running_sidecar = command.alternated, command.running_sidecar
    monkeypatch.setattr(command, "running_sidecar", killed)
    assert run_demo(model_with_prompts, tmp_path) == 2
    assert "no connection to the drafter at" in capsys.readouterr().err
    assert not (tmp_path / "run.json").exists()


# --- Tasks for chat models

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    make_folder(folder, num_hidden_layers=1, max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_tasks_of_a_conversation_are_in_order(chat_folder):
    chat = ChatPrompts(chat_folder, Tokenizer(chat_folder))
    tasks = make_tasks(chat, seed=0)
    conversations = [json.loads(line) for line in TASKS_FILE.read_text().splitlines()]
    assert {task.task for task in tasks} == {"edit", "quote", "json", "agent"}
    assert len(tasks) == sum((len(each["messages"]) + 1) // 2 for each in conversations) >= 30
    assert len({task.prompt for task in tasks}) == len(tasks)
    prompts = [task.prompt for task in tasks]
    for each in conversations:
        assert len(each["messages"]) % 2 == 1, "the last message is the model's to answer"
        assert all(map(json.loads, each["messages"][1::2])), "an agent answers in JSON"
        own = [at for at, prompt in enumerate(prompts) if prompt.startswith(f"<user>{each['messages'][0]}")]
        assert own == sorted(own, key=lambda at: len(prompts[at]))
    assert make_tasks(chat, seed=0) == tasks != make_tasks(chat, seed=1)


def test_a_chat_model_runs_the_tasks_with_identical_outputs(chat_folder, tmp_path, capsys):
    assert run_demo(chat_folder, tmp_path) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    tasks = {result["drafter"]: result for result in run["results"] if result["part"] == "by kind of request"}
    assert all(result["identical"] for result in run["results"])
    assert tasks.pop("all")["prompts"] == sum(result["prompts"] for result in tasks.values()) == 10
    printed = capsys.readouterr().out
    assert "none of which repeats" in " ".join(printed.split())
    assert all(f"the last output of {task}:" in printed for task in tasks)
    assert all(f"<td>{task}</td>" in (tmp_path / "run.html").read_text() for task in tasks)


def test_a_model_without_prompts_and_chat_template_is_refused(model_folder, tmp_path, capsys):
    assert run_demo(model_folder, tmp_path) == 2
    assert "has neither a prompts.jsonl, with functions to complete, nor a chat template" in capsys.readouterr().err
