"""Tokenizers and chat templates of model folders."""

import json
from pathlib import Path

import pytest

from drafter_service.client import tokenizer as tokenizer_module
from drafter_service.ingest.chats import Chat
from drafter_service.ingest.documents import RecordError
from drafter_service.ingest.reading import REFUSED, ChatFormatter, Vocabulary
from ssd.errors import UserError
from tests.drafter_service.ingest.loads import MODEL, TEMPLATE, model_folder

USER = {"role": "user", "content": "Why <b>?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "<it>"}}}],
}


def test_encoding_agrees_with_the_library_for_any_number_of_texts(monkeypatch):
    from tokenizers import Tokenizer

    monkeypatch.setattr("drafter_service.client.tokenizer.CHARS_AT_ONCE", 50)
    texts = [f"def f{index}(x):\n    return x\n" * (index % 5) for index in range(40)]
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in Vocabulary(MODEL).encode(texts)] == expected


def test_long_texts_are_not_truncated(tmp_path):
    folder = model_folder(tmp_path / "m")
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    long, short = Vocabulary(folder).encode(["import os\n" * 100, "import"])
    assert len(long) > 100
    assert len(short) < 16


def small_tokenizer(kind):
    """Return a tokenizer of a family of models, trained on a few lines."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    lines = (MODEL / "prompts.jsonl").read_text()[:200_000].split("\\n")
    digits = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    prepended = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    pre = {
        "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "llama3": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        "llama2": None,
        "metaspace": pre_tokenizers.Metaspace(prepend_scheme="first"),
        "gemma": pre_tokenizers.Split(" ", "merged_with_previous"),
        "one word": None,
    }[kind]
    tokenizer = Tokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if kind == "llama2":
        tokenizer.normalizer = normalizers.Sequence(prepended)
        # Merges across words are not learned, as in SentencePiece.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    if kind == "llama2":
        tokenizer.pre_tokenizer = None
    return tokenizer


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "metaspace", "gemma", "one word"])
def test_long_texts_are_tokenized_in_pieces_with_the_same_result(tmp_path, monkeypatch, kind):
    tokenizer = small_tokenizer(kind)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    code = json.loads((MODEL / "prompts.jsonl").read_text().splitlines()[0])["prompt"]
    text = f"{code}\n\n  foo  bar, 12345 it's;\n/x  \n\n" * 40 + "我们看海。海是蓝的。" * 200 + "x" * 3000 + code * 20
    monkeypatch.setattr(tokenizer_module, "CHARS_AT_ONCE", 700)
    vocabulary = Vocabulary(tmp_path)
    pieces = list(vocabulary._pieces(text))
    assert vocabulary.encode([text, "", "a b"])[0].tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    assert len(pieces) > 10
    assert max(map(len, pieces[:10])) < 3 * 700


def test_memory_for_texts_without_words_is_bounded(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "CHARS_AT_ONCE", 700)
    pieces = list(Vocabulary(MODEL)._pieces("0123456789" * 1000))
    assert "".join(pieces) == "0123456789" * 1000
    assert max(map(len, pieces)) <= 2 * 700


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer.json; give the folder of a model"),
        ({"tokenizer.json": b""}, "cannot be read"),
        ({"tokenizer.json": b"{}"}, "cannot be read"),
        ({"tokenizer.json": b"version https://git-lfs.github.com/spec/v1"}, "git lfs pull"),
        ({"tekken.json": b"{}"}, r"Mistral \(tekken.json\) and no tokenizer.json; convert it"),
        ({"tokenizer.model": b""}, "SentencePiece.*AutoTokenizer"),
        ({"qwen.tiktoken": b"", "x.gguf": b""}, "tiktoken.*AutoTokenizer"),
        ({"m-Q4.gguf": b"GGUF"}, "has no tokenizer.json; give its GGUF file, .*m-Q4.gguf"),
        ({"m-Q8.gguf": b"GGUF", "m-Q4.gguf": b"GGUF"}, "give one of its GGUF files, such as .*m-Q4.gguf"),
    ],
)
def test_folders_without_a_tokenizer(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        Vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Qwen/Qwen3-8B", "hf download Qwen/Qwen3-8B --local-dir FOLDER"),
        ("./missing/model", "there is no folder"),
        ("m.gguf", "is not a GGUF file"),
        ("pointer.gguf", "is a pointer of Git LFS"),
        ("missing.gguf", "there is no file missing.gguf"),
        ("tokenizer.json", "is a file; give the folder"),
    ],
)
def test_other_things_than_folders(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    for name in ("m.gguf", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match=message):
        Vocabulary(Path(path))


def test_templates_are_found_in_all_usual_places(tmp_path):
    folder = model_folder(
        tmp_path / "m",
        [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{% for each in messages %}A{% break %}{% endfor %}"},
        ],
    )
    assert ChatFormatter(folder).prompt_text(Chat([USER])) == "A"
    (folder / "chat_template.jinja").write_text("B")
    assert ChatFormatter(folder).prompt_text(Chat([USER])) == "B"


def test_tool_calls_are_rendered_by_the_template(tmp_path):
    chat = ChatFormatter(model_folder(tmp_path / "m"))
    assert chat.reply_text(Chat([USER]), CALL) == '{"name": "look", "arguments": {"at": "<it>"}}<|end|>'
    assert chat.reply_text(None, CALL) == '{"name": "look", "arguments": {"at": "<it>"}}'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{% if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}", "[Hm.]So.<|end|>"),
        ("", "Hm.\n\nSo."),
    ],
)  # fmt: skip
def test_reasoning_is_rendered_by_the_template_or_stands_before_the_answer(tmp_path, content, expected):
    template = TEMPLATE.replace("{{ message.content }}", f"{content}{{{{ message.content }}}}")
    chat = ChatFormatter(model_folder(tmp_path / "m", template))
    answer = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    assert chat.reply_text(Chat([USER]), answer) == expected


@pytest.mark.parametrize("template", [None, "{% nonsense %}", "{{"])
def test_without_a_usable_template_messages_are_concatenated(tmp_path, template):
    chat = ChatFormatter(model_folder(tmp_path / "m", template))
    assert chat.note is None
    assert chat.prompt_text(Chat([USER, {"role": "assistant", "content": "So."}])) == "Why <b>?\nSo.\n"
    assert chat.reply_text(Chat([USER]), CALL) == '{"name": "look", "arguments": {"at": "<it>"}}'
    assert "concatenated" in chat.note


def test_templates_cannot_leave_their_sandbox(tmp_path):
    chat = ChatFormatter(model_folder(tmp_path / "m", "{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(RecordError, match=REFUSED):
        chat.prompt_text(Chat([USER]))
    chat = ChatFormatter(model_folder(tmp_path / "n", "{{ messages.append(1) }}"))
    with pytest.raises(RecordError, match=REFUSED):
        chat.prompt_text(Chat([USER]))
