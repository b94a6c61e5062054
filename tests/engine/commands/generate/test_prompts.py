"""Where the prompts of the `generate` command come from."""

import io
import json

from tests.engine.commands.generate.outputs import PROMPT, completions, records
from tests.engine.lora_folders import write_adapter


def test_prompts_from_files_and_stdin_are_the_same_prompts(run, model_folder, tmp_path):
    base = ("generate", "--model", model_folder, "--max-tokens", 8)
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n\nclass Pair:\n")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in (PROMPT, "class Pair:")))
    outputs = []
    for name, arguments, stdin in (
        ("args", (PROMPT, "class Pair:"), None),
        ("text", ("--file", tmp_path / "prompts.txt"), None),
        ("jsonl", ("--file", tmp_path / "prompts.jsonl"), None),
    ):
        assert run(*base, *arguments, "--out", tmp_path / name, stdin=stdin)[0] == 0
        outputs.append([line["tokens"] for line in completions(tmp_path / name)])
    assert run(*base, "--out", tmp_path / "stdin", stdin=PROMPT)[0] == 0
    assert run(*base, "--out", tmp_path / "dash", "--file", "-", stdin=PROMPT)[0] == 0
    assert outputs[0] == outputs[1] == outputs[2]
    assert [line["tokens"] for line in completions(tmp_path / "stdin")] == outputs[0][:1]
    assert [line["tokens"] for line in completions(tmp_path / "dash")] == outputs[0][:1]


def test_only_newlines_separate_the_prompts_of_a_file(run, model_folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\x0cb\u2028c\nd\n", encoding="utf-8")
    arguments = ("--file", tmp_path / "prompts.txt", "--out", tmp_path / "out", "--max-tokens", 1)
    assert run("generate", "--model", model_folder, *arguments)[0] == 0
    assert [line["prompt"] for line in completions(tmp_path / "out")] == ["a\x0cb\u2028c", "d"]


def test_prompts_can_be_token_ids(run, model_folder, tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"prompt": [5, 6, 7]}\n')
    code, out, _ = run("generate", "--model", model_folder, "--file", tmp_path / "ids.jsonl", "--max-tokens", 3)
    assert code == 0
    assert out.startswith("<3 token ids>")


def test_prompts_can_be_messages_of_a_chat(run, model_folder, tmp_path):
    folder = tmp_path / "chat"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}; ")
    arguments = ("generate", "--model", folder, "--max-tokens", 8)
    _, plain, _ = run(*arguments, "user: add; ")
    code, chat, _ = run(*arguments, "--chat", "add")
    assert (code, f"user: add; {chat}") == (0, plain)
    assert run(*arguments, "--chat", "--out", tmp_path / "out", "add")[0] == 0
    assert [line["prompt"] for line in completions(tmp_path / "out")] == ["add"]
    (tmp_path / "ids.jsonl").write_text('{"prompt": [5, 6, 7]}\n')
    _, _, err = run(*arguments, "--chat", "--file", tmp_path / "ids.jsonl")
    assert "prompt 1: --chat formats text, not token ids" in err
    assert "has no chat template; leave --chat out" in run("generate", "--model", model_folder, "--chat", "add")[2]


def test_a_missing_prompt_at_a_terminal_is_an_error(run, model_folder):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    code, _, err = run("generate", "--model", model_folder, stdin=Terminal())
    assert code == 2
    assert "no prompt" in err


def test_lines_choose_their_adapters(run, model_folder, tmp_path):
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, model_folder, seed=seed)
    adapters = ("--lora", f"a={tmp_path / 'a'}", "--lora", f"b={tmp_path / 'b'}")
    texts = {}
    for name in (None, "a", "b"):
        chosen = () if name is None else ("--adapter", name)
        code, texts[name], err = run(
            "generate", "--model", model_folder, "--max-tokens", "9", *adapters, *chosen, PROMPT
        )
        assert (code, "warning" in err) == (0, False)
    assert len(set(texts.values())) == 3
    names = ["b", None, "a", "b"]
    lines = [json.dumps({"prompt": PROMPT} | ({} if name is None else {"adapter": name})) for name in names]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    run("generate", "--model", model_folder, "--max-tokens", "9", *adapters, "--file", tmp_path / "prompts.jsonl",
        "--out", tmp_path / "out.jsonl")  # fmt: skip
    assert [f"{PROMPT}{record['completion']}\n" for record in records(tmp_path / "out.jsonl")] == [
        texts[name] for name in names
    ]
