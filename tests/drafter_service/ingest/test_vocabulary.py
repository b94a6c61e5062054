"""Tokenizers and chat templates of model folders."""

import json
from pathlib import Path

import pytest

from drafter_service.client import tokenizer as tokenizer_module
from drafter_service.ingest import reading
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
    assert chat.reply_text(None, CALL) == '{"name": "look", "arguments": {"at": "<it>"}}<|end|>'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{% if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}", "[Hm.]So.<|end|>"),
        ("", "Hm.\n\nSo.<|end|>"),
    ],
)  # fmt: skip
def test_reasoning_is_rendered_by_the_template_or_stands_before_the_answer(tmp_path, content, expected):
    template = TEMPLATE.replace("{{ message.content }}", f"{content}{{{{ message.content }}}}")
    chat = ChatFormatter(model_folder(tmp_path / "m", template))
    answer = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    assert chat.reply_text(Chat([USER]), answer) == expected


THOUGHTFUL = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
PLAIN_CALL = '{"name": "look", "arguments": {"at": "<it>"}}'
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% else %}"
    "{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking %}<a><analysis>{{ m.thinking }}{% endif %}"
    "<a>{% for call in m.tool_calls %}to={{ call.function.name }}{% endfor %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% else %}<a>ANSWER{{ m.content }}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }}{% endfor %}<e>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>PROMPT{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "answer", "expected", "count"),
    [
        (GPT_OSS, CALL | {"reasoning_content": "Hm."}, "<analysis>Hm.<a>to=look", 0),
        (GPT_OSS, THOUGHTFUL, "<analysis>Hm.<a>So.", 0),
        (GPT_OSS, CALL | THOUGHTFUL, "Hm.\n\nto=lookSo.", 0),
        (DEEPSEEK.replace("ANSWER", "").replace("PROMPT", "<think>\n"), THOUGHTFUL, "Hm.\n</think>\n\nSo.<e>", 0),
        (DEEPSEEK.replace("ANSWER", "").replace("PROMPT", "<think>\n"), CALL, "<call>look<e>", 0),
        (DEEPSEEK.replace("ANSWER", "</think>").replace("PROMPT", "<think>"), THOUGHTFUL, "Hm.</think>So.<e>", 0),
        (DEEPSEEK.replace("ANSWER", "</think>").replace("PROMPT", "</think>"), THOUGHTFUL, "Hm.</think>So.<e>", 0),
        ("{% for m in messages %}{{ m.content }}<|look_at|>{% endfor %}", CALL, PLAIN_CALL, 1),
        (
            "{% for m in messages %}{{ m.content }}<e>{% endfor %}",
            CALL | {"content": "I look."},
            f"I look.\n\n{PLAIN_CALL}",
            1,
        ),
        ("{{ messages[0].content }}{{ raise_exception('no') if messages[1] }}", CALL, PLAIN_CALL, 1),
    ],
)  # fmt: skip
def test_reasoning_and_calls_are_those_of_the_template_or_counted(tmp_path, template, answer, expected, count):
    chat = ChatFormatter(model_folder(tmp_path / "m", template))
    assert chat.reply_text(Chat([USER]), answer) == chat.reply_text(None, answer) == expected
    assert (f": {2 * count}; they are read as text" in str(chat.note)) == bool(count)


QWEN = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}Be short.{% endif %}<{{ m.role }}>"
    "{% if m.role == 'user' and not ns.seen %}{{ tools | tojson }}{% endif %}{% if m.role == 'user' %}"
    "{% set ns.seen = true %}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MISTRAL = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' and not"
    " m.tool_calls %}{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}"
)
WHOLE = (
    QWEN + "{% if messages | length > 5 and messages[4].content != 'I look 1.' %}{{ raise_exception('no') }}{% endif %}"
)


def long_chat(turns):
    """Return the messages of a session with tools, in which the user writes every tenth turn."""
    messages = [{"role": "system", "content": "Answer in one word."}]
    for turn in range(turns):
        if turn % 10 == 0:
            messages.append({"role": "user", "content": f"Why {turn}? " * (turn % 7)})
        calling = CALL | {"content": f"I look {turn}.", "reasoning_content": f"Hm {turn}."}
        messages += [calling, {"role": "tool", "content": f"seen {turn} " * (turn % 23)}]
        messages += [THOUGHTFUL] if turn % 10 == 9 else []
    return messages


@pytest.mark.parametrize("template", [QWEN, "{% set ns = namespace(seen=false) %}" + LLAMA, MISTRAL, WHOLE, None])
def test_the_end_of_a_chat_is_rendered_as_in_the_whole_one(tmp_path, monkeypatch, template):
    chat, messages = ChatFormatter(model_folder(tmp_path / "m", template)), long_chat(45)
    found = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(reading, "without_beginning", lambda chat: chat)
        found.append([])
        for index in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
            before = Chat(messages[:index], [{"type": "function", "function": {"name": "look"}}])
            found[-1].append((chat.prompt_end(before), chat.reply_text(before, messages[index])))
    assert found[0] == found[1]
    assert all(len(prompt) == reading.PREFIX_CHARS for prompt, _ in found[0][-20:])


@pytest.mark.parametrize("template", [QWEN, MISTRAL])
def test_messages_long_before_an_answer_are_not_rendered(tmp_path, monkeypatch, template):
    """So the time of a load grows with the length of a session, not with its square."""
    chat, messages = ChatFormatter(model_folder(tmp_path / "m", template)), long_chat(400)
    rendered, render = [], chat._template.render
    monkeypatch.setattr(
        chat._template, "render", lambda given, **more: rendered.append(len(given)) or render(given, **more)
    )
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"][-60:]
    for end in ends:
        chat.prompt_end(Chat(messages[:end]))
        chat.reply_text(Chat(messages[:end]), messages[end])
    assert len(rendered) <= 4 * len(ends)
    assert max(rendered) < 60 < len(messages) / 10


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
