"""The `generate` command: its prompts, its sampling options, and how it writes completions."""

import itertools
import json
import re
import signal
import sys

import pytest

from engine.commands import generate as command
from engine.commands.generate import CompletionWriter
from engine.engine import Engine
from engine.scheduling.request import SamplingParams

PROMPT = "def add(left, right):"


def test_completions_can_be_lines_on_stdout(printed):
    [line] = printed("--max-tokens", 3, "--out", "-", PROMPT).splitlines()
    assert len(json.loads(line)["tokens"]) == 3


def test_completions_are_in_the_order_of_their_prompts(generate):
    prompts = [f"def f{number}():" for number in range(9)]
    written = generate("--max-tokens", 20, "--max-sequences", 3, "--temperature", 1, *prompts)
    assert [line["prompt"] for line in written.records] == prompts


def test_a_new_file_of_outputs_is_readable_by_its_owner_only(generate, tmp_path):
    out = tmp_path / "out"
    for mode in (0o600, 0o640):
        generate("--max-tokens", 1, PROMPT, "--out", out)
        assert out.stat().st_mode & 0o777 == mode
        out.chmod(0o640)


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
def test_an_interrupted_run_writes_what_it_has(generate, call_at_step, number, status):
    call_at_step(12, lambda: signal.raise_signal(number))
    limits = ("--max-tokens", 5, "--max-sequences", 1, "--drafter", "none", "--ignore-eos")
    handler = signal.getsignal(number)
    written = generate(*limits, "a", "b", "c", "d", status=status)
    found = [(line["prompt"], len(line["tokens"]), line["finish_reason"]) for line in written.records]
    assert found == [("a", 5, "length"), ("b", 5, "length"), ("c", 3, "abort")]
    assert signal.getsignal(number) is handler


def test_a_single_output_is_printed_while_it_is_produced(printed, call_at_step):
    arguments = ("--max-tokens", 30, "--drafter", "none", "--ignore-eos", PROMPT)
    whole, shown = printed(*arguments), []
    call_at_step(12, lambda: shown.append(sys.stdout.getvalue()))
    assert printed(*arguments) == whole
    assert len(PROMPT) + 5 < len(shown[0]) < len(whole)
    call_at_step(12, lambda: signal.raise_signal(signal.SIGINT))
    part = printed(*arguments)
    assert part.startswith(shown[0])
    assert whole.startswith(part.removesuffix("\n"))
    assert len(part) < len(whole)


def test_a_printed_output_ends_before_a_stop_string(printed):
    whole = printed("--max-tokens", 60, PROMPT)
    stop = whole[len(PROMPT) + 7 : len(PROMPT) + 10]
    assert printed("--max-tokens", 60, PROMPT, "--stop", stop) == whole[: whole.index(stop, len(PROMPT))] + "\n"


def test_an_interruption_while_a_completion_is_written_does_not_lose_it(generate, monkeypatch):
    text, interruptions = CompletionWriter._text, iter([KeyboardInterrupt])

    def text_or_stop(writer, index):
        for interruption in interruptions:
            raise interruption
        return text(writer, index)

    monkeypatch.setattr(CompletionWriter, "_text", text_or_stop)
    written = generate("--max-tokens", 5, "--max-sequences", 1, "a", "b", status=130)
    assert [line["index"] for line in written.records] == [0]


def test_outputs_that_the_context_window_limits_are_announced(generate):
    err = generate("--max-tokens", 100_000, "--stop", "e", PROMPT, "x = 1").err
    assert len(re.findall(r"note: prompt [12] leaves room for \d+ of 100,000 tokens", err)) == 2
    assert "note" not in generate("--max-tokens", 1, PROMPT).err


# --- Prompts


def test_prompts_from_arguments_files_and_stdin_are_the_same_prompts(generate, tmp_path):
    prompts = [PROMPT, "a\x0cb\u2028c"]  # Only newlines separate the prompts of a file.
    (tmp_path / "prompts.txt").write_text("\n\n".join(prompts) + "\n", encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    expected = generate("--max-tokens", 8, *prompts).records
    assert [line["prompt"] for line in expected] == prompts
    for name in ("prompts.txt", "prompts.jsonl"):
        assert generate("--max-tokens", 8, "--file", tmp_path / name).records == expected
    for arguments in ((), ("--file", "-")):
        assert generate("--max-tokens", 8, *arguments, stdin=PROMPT).records == expected[:1]


def test_prompts_can_be_token_ids_and_messages_of_a_chat(run, generate, model_folder, tmp_path):
    folder = tmp_path / "chat"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}; ")
    arguments = ("generate", "--model", folder, "--max-tokens", 8)
    code, chat, _ = run(*arguments, "--chat", "add")
    assert (code, f"user: add; {chat}") == (0, run(*arguments, "user: add; ")[1])
    assert [line["prompt"] for line in generate("--chat", "--max-tokens", 1, "add", model=folder).records] == ["add"]
    (tmp_path / "ids.jsonl").write_text('{"prompt": [5, 6, 7]}\n')
    assert run(*arguments, "--file", tmp_path / "ids.jsonl")[1].startswith("<3 token ids>")
    refused = generate("--chat", "--file", tmp_path / "ids.jsonl", model=folder, status=2).err
    assert "prompt 1: --chat formats text, not token ids" in refused
    assert "has no chat template; leave --chat out" in generate("--chat", "add", status=2).err


# --- Sampling


def test_every_sampling_option_reaches_the_request(run, monkeypatch):
    received = []
    monkeypatch.setattr(command, "run_generate", lambda *arguments: received.append(arguments[-1]))
    given = {"max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 5}
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    flags += ["--stop", "a", "--stop", "b", "--ignore-eos"]
    assert run("generate", *flags, "x")[0] == 0
    assert run("generate", "x")[0] == 0
    assert received == [SamplingParams(**given, stop=("a", "b"), ignore_eos=True), SamplingParams()]


def test_repeated_prompts_have_different_seeds(generate, printed):
    base = ("--drafter", "none", "--temperature", 1, "--max-tokens", 12)
    written = generate(*base, PROMPT, PROMPT)
    assert "2 outputs" in written.err
    first, second = (line["tokens"] for line in written.records)
    assert first != second
    assert generate(*base, PROMPT, "--seed", 1).records[0]["tokens"] == second
    assert printed(*base, PROMPT, PROMPT).count(PROMPT) == 2
