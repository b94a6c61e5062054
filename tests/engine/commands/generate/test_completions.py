"""How the `generate` command writes completions and its summary."""

import itertools
import json
import re
import signal
import sys

import pytest

from engine.commands.generate import CompletionWriter
from engine.engine import Engine
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


def test_a_new_file_of_outputs_is_readable_by_its_owner_only(run, model_folder, tmp_path):
    arguments = ("--model", model_folder, "--max-tokens", 1, PROMPT)
    assert run("generate", *arguments, "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600
    (tmp_path / "out").chmod(0o640)
    assert run("generate", *arguments, "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


@pytest.fixture
def call_at_step(monkeypatch):
    """Return a function that lets the engine call a function before a step, counted from 0."""

    def call_at_step(number, call):
        step, steps = Engine.step, itertools.count()

        def step_after_call(engine):
            if next(steps) == number:
                call()
            return step(engine)

        monkeypatch.setattr(Engine, "step", step_after_call)

    return call_at_step


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_writes_what_it_has(run, model_folder, tmp_path, call_at_step, number, status):
    call_at_step(12, lambda: signal.raise_signal(number))
    arguments = ("--model", model_folder, "--max-tokens", 5, "--max-sequences", 1, "--drafter", "none", "--ignore-eos")
    handler = signal.getsignal(number)
    assert run("generate", *arguments, "--out", tmp_path / "out", "a", "b", "c", "d")[0] == status
    found = [(line["prompt"], len(line["tokens"]), line["finish_reason"]) for line in completions(tmp_path / "out")]
    assert found == [("a", 5, "length"), ("b", 5, "length"), ("c", 3, "abort")]
    assert signal.getsignal(number) is handler


def test_a_single_output_is_printed_while_it_is_produced(run, model_folder, call_at_step):
    arguments = ("--model", model_folder, "--max-tokens", 30, "--drafter", "none", "--ignore-eos", PROMPT)
    _, whole, _ = run("generate", *arguments)
    shown = []
    call_at_step(12, lambda: shown.append(sys.stdout.getvalue()))
    assert run("generate", *arguments)[1] == whole
    assert len(PROMPT) + 5 < len(shown[0]) < len(whole)
    assert whole.startswith(shown[0])
    call_at_step(12, lambda: signal.raise_signal(signal.SIGINT))
    code, part, _ = run("generate", *arguments)
    assert code == 130
    assert part.startswith(shown[0])
    assert whole.startswith(part.removesuffix("\n"))
    assert len(part) < len(whole)


def test_a_printed_output_ends_before_a_stop_string(run, model_folder):
    arguments = ("generate", "--model", model_folder, "--max-tokens", 60, PROMPT)
    whole = run(*arguments)[1]
    stop = whole[len(PROMPT) + 7 : len(PROMPT) + 10]
    assert run(*arguments, "--stop", stop)[1] == whole[: whole.index(stop, len(PROMPT))] + "\n"


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


def test_outputs_that_the_context_window_limits_are_announced(run, model_folder):
    _, out, err = run("generate", "--model", model_folder, "--max-tokens", 100_000, "--stop", "e", PROMPT, "x = 1")
    assert out.startswith(PROMPT)
    assert len(re.findall(r"note: prompt [12] leaves room for \d+ of 100,000 tokens", " ".join(err.split()))) == 2
    assert "note" not in run("generate", "--model", model_folder, "--max-tokens", 1, PROMPT)[2]
