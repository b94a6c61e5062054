"""Tokenizers and chat templates of model folders."""

import json

import pytest

from drafter_service.ingest.chats import Chat
from drafter_service.ingest.documents import RecordError
from drafter_service.ingest.vocabulary import REFUSED, ChatFormatter, Vocabulary
from ssd.errors import UserError
from tests.drafter_service.ingest.loads import MODEL, TEMPLATE, model_folder

USER = {"role": "user", "content": "Why <b>?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "<it>"}}}],
}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def test_encoding_agrees_with_the_library_for_any_number_of_texts(monkeypatch):
    from tokenizers import Tokenizer

    monkeypatch.setattr("drafter_service.ingest.vocabulary.CHARS_AT_ONCE", 50)
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


@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_folders_without_a_tokenizer(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match="--tokenizer"):
        Vocabulary(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{{ bos_token }}{%- for m in messages %}\n  {{- m.role }}: {{ m.content }}\n{% if loop.last %}{% break %}"
        "{% endif %}{% endfor %}",
        "{{ tools | tojson(indent=2) }}{{ messages[0] | tojson }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    ],
)
def test_templates_agree_with_transformers(tmp_path, template):
    rendered = (
        pytest.importorskip("transformers.utils.chat_template_utils")
        ._compile_jinja_template(template)
        .render(messages=[USER, CALL, USER], tools=TOOLS, add_generation_prompt=True, bos_token="<s>")
    )
    chat = ChatFormatter(model_folder(tmp_path / "m", template))
    assert chat.prompt_text(Chat([USER, CALL, USER], TOOLS)) == rendered
    assert chat.note is None


def test_templates_are_found_in_all_usual_places(tmp_path):
    folder = model_folder(
        tmp_path / "m", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "A"}]
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
    assert not chat.was_missing
    assert chat.prompt_text(Chat([USER, {"role": "assistant", "content": "So."}])) == "Why <b>?\nSo.\n"
    assert chat.reply_text(Chat([USER]), CALL) == '{"name": "look", "arguments": {"at": "<it>"}}'
    assert chat.was_missing
    assert "concatenated" in chat.note


def test_templates_cannot_leave_their_sandbox(tmp_path):
    chat = ChatFormatter(model_folder(tmp_path / "m", "{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(RecordError, match=REFUSED):
        chat.prompt_text(Chat([USER]))
    chat = ChatFormatter(model_folder(tmp_path / "n", "{{ messages.append(1) }}"))
    with pytest.raises(RecordError, match=REFUSED):
        chat.prompt_text(Chat([USER]))
