"""How the `generate` command writes completions and its summary."""

import json
import re

from engine.commands.generate import CompletionWriter
from tests.engine.commands.generate.outputs import PROMPT, completions


def test_completions_can_be_lines_on_stdout(run, model_folder):
    code, out, _ = run("generate", "--model", model_folder, "--max-tokens", 3, "--out", "-", PROMPT)
    [line] = out.splitlines()
    assert code == 0
    assert len(json.loads(line)["tokens"]) == 3


def test_completions_are_in_the_order_of_their_prompts(run, model_folder, tmp_path):
    prompts = [f"def f{number}():" for number in range(9)]
    arguments = ("--out", tmp_path / "out", "--max-tokens", 20, "--max-sequences", 3, "--temperature", 1)
    assert run("generate", "--model", model_folder, *arguments, *prompts)[0] == 0
    assert [line["prompt"] for line in completions(tmp_path / "out")] == prompts


def test_an_interrupted_run_writes_finished_completions(run, model_folder, tmp_path, monkeypatch):
    from engine.engine import Engine

    arguments = ("--out", tmp_path / "out", "--max-tokens", 5, "--max-sequences", 1, "--drafter", "none")
    step, steps = Engine.step, iter(range(1000))

    def step_or_stop(engine):
        if next(steps) == 12:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_or_stop)
    assert run("generate", "--model", model_folder, *arguments, "a", "b", "c", "d")[0] != 0
    assert [line["prompt"] for line in completions(tmp_path / "out")] == ["a", "b"]


def test_an_interruption_while_a_completion_is_written_does_not_lose_it(run, model_folder, tmp_path, monkeypatch):
    text, interruptions = CompletionWriter._text, iter([KeyboardInterrupt])

    def text_or_stop(writer, index):
        for interruption in interruptions:
            raise interruption
        return text(writer, index)

    monkeypatch.setattr(CompletionWriter, "_text", text_or_stop)
    arguments = ("--out", tmp_path / "out", "--max-tokens", 5, "--max-sequences", 1)
    assert run("generate", "--model", model_folder, *arguments, "a", "b")[0] != 0
    assert [line["index"] for line in completions(tmp_path / "out")] == [0]


def test_the_summary_uses_singular_and_plural(run, model_folder):
    _, _, err = run("generate", "--model", model_folder, "--max-tokens", 1, PROMPT)
    assert "1 output, 1 token in" in err


def test_outputs_that_the_context_window_limits_are_announced(run, model_folder):
    _, out, err = run("generate", "--model", model_folder, "--max-tokens", 100_000, "--stop", "e", PROMPT, "x = 1")
    assert out.startswith(PROMPT)
    assert len(re.findall(r"note: prompt [12] leaves room for \d+ of 100,000 tokens", " ".join(err.split()))) == 2
    assert "note" not in run("generate", "--model", model_folder, "--max-tokens", 1, PROMPT)[2]
