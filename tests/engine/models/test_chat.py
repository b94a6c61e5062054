"""Chat prompts compared with those of transformers' tokenizers, for common kinds of templates."""

import json
import shutil

import pytest
from transformers import PreTrainedTokenizerFast

from drafter_service.client.chat_template import load_chat_template
from drafter_service.ingest.chats import chat_of
from drafter_service.ingest.reading import ChatFormatter
from engine.api.schemas import ChatRequest
from engine.models.tokenizer import ChatPrompts, Tokenizer
from ssd.errors import UserError

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + "}" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>\\n\\n' }}{%- endif %}
{{- date_string }}
"""
QWEN = """{%- set ns = namespace(system=false) %}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = true %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>' + call.function.name + ' ' }}{{- call.function.arguments | tojson(indent=2) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if not ns.system %}{{- 'no system' }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate\\nuser/assistant') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""

USER = {"role": "user", "content": "Why <b>'é'</b>?\n "}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "id": "a", "function": {"name": "look", "arguments": {"at": "<é>", "n": 1}}}],
}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "é", "parameters": {"type": "object"}}}]


@pytest.fixture
def folder(tmp_path, model_folder):
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    return tmp_path


def prompts_of(folder, template, **config):
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": template, **config}))
    return ChatPrompts(folder, Tokenizer(folder))


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "tools", "arguments"),
    [
        (LLAMA, [SYSTEM, USER], None, {}),
        (LLAMA, [USER, CALL, USER], TOOLS, {"date_string": "26 Jul 2024"}),
        (QWEN, [SYSTEM, USER], None, {}),
        (QWEN, [USER, CALL], TOOLS, {"enable_thinking": False}),
        (MISTRAL, [USER, {"role": "assistant", "content": "So."}, USER], None, {}),
    ],
)
def test_prompts_equal_those_of_transformers(folder, template, messages, tools, arguments, add_generation_prompt):
    settings = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **settings, **arguments)
    prompts = prompts_of(folder, template)
    assert load_chat_template(folder).render(messages, **settings, arguments=arguments) == expected
    if add_generation_prompt and tools is None:
        tokens = prompts.tokens(messages, arguments=arguments)
        assert tokens.tolist() == Tokenizer(folder).encode(expected, add_special_tokens=False).tolist()


@pytest.mark.parametrize("content", ["So", "So ", " So\n", ""])
@pytest.mark.parametrize("template", [LLAMA, QWEN, MISTRAL])
def test_a_final_message_is_continued_as_by_transformers(folder, template, content):
    messages = [USER, {"role": "assistant", "content": content}]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    expected = theirs.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompts_of(folder, template).text(messages, **options) == expected


def test_a_final_message_that_the_template_leaves_out_is_not_continued(folder):
    prompts = prompts_of(folder, "{{ messages[0].content }}")
    with pytest.raises(UserError, match="does not show the final message"):
        prompts.text([USER, {"role": "assistant", "content": "So"}], continue_final_message=True)


def test_variables_that_a_template_does_not_use_are_known(folder):
    names = ["enable_thinking", "bos_token", "tokenize", "raise_exception", "ns", "message"]
    assert prompts_of(folder, QWEN).unused(names, has_tools=False) == names[1:]


def test_text_parts_and_json_arguments_are_parsed(folder):
    prompts = prompts_of(folder, QWEN)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert prompts.text([parts]) == prompts.text([{"role": "user", "content": "a\nb"}])
    function = CALL["tool_calls"][0]["function"]
    as_json = {**CALL, "tool_calls": [{"function": {**function, "arguments": json.dumps(function["arguments"])}}]}
    assert prompts.text([USER, as_json]) == prompts.text([USER, CALL])


def test_special_tokens_are_not_added_twice(folder):
    """The tokenizer adds a token before every text, and the template renders it as well."""
    settings = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    prompts = prompts_of(folder, "{{ bos_token }}{{ messages[0].content }}", bos_token="<|endoftext|>")
    assert Tokenizer(folder).encode("def")[0] == 0
    assert prompts.tokens([{"role": "user", "content": "def"}]).tolist().count(0) == 1


def test_the_tool_template_is_used_if_there_is_one(folder):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    assert prompts_of(folder, templates).text([USER]) == "plain"
    assert prompts_of(folder, templates).text([USER], TOOLS) == "with tools"
    assert load_chat_template(folder).render([USER], tools=TOOLS) == "with tools"
    (folder / "chat_template.jinja").write_text("a file")
    assert load_chat_template(folder).render([USER], tools=TOOLS) == "a file"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, True),
        ("{%- if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}a{% endif %}", True),
        ("{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}{{ tools }}", True),
        ("{{ messages[0].tools }}", False),
        (LLAMA, False),
        ([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}"}], True),
        (None, False),
    ],
)
def test_whether_a_template_uses_tools(folder, template, expected):
    assert prompts_of(folder, template).takes_tools == expected


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [USER], "no chat template"),
        (MISTRAL, [USER, USER], "refuses the messages: roles must alternate user/assistant"),
        ("{{ messages[0].content + 1 }}", [USER], "refuses the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", [USER], "refuses the messages.*unsafe"),
        ("{{ messages.append(1) }}", [USER], "refuses the messages"),
        (QWEN, [{"role": "user", "content": [{"type": "image_url"}]}], "not text"),
        (QWEN, [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "not JSON"),
        (QWEN, [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}], "not JSON"),
    ],
)
def test_rendering_errors_are_one_line(folder, template, messages, message):
    prompts = prompts_of(folder, template)
    with pytest.raises(UserError, match=message) as refused:
        prompts.tokens(messages)
    assert "\n" not in str(refused.value)


def test_an_invalid_template_is_refused_at_the_start(folder):
    with pytest.raises(UserError, match=r"the chat template of .* is refused"):
        prompts_of(folder, "{% nonsense %}")


def test_the_tokenizers_truncation_setting_is_ignored(folder):
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    assert len(Tokenizer(folder).encode("def add\n" * 100)) > 100


DEEPSEEK = """{{ tools }}{% for message in messages %}{% if message['tool_calls'] is defined %}
{% for call in message['tool_calls'] %}{% if message['content'] is none %}
{{ '<call>' + call['function']['name'] + '<sep>' + call['function']['arguments'] + '</call>' }}
{% else %}
{{ message['content'] + '<call>' + call['function']['name'] + '<sep>' + call['function']['arguments'] + '</call>' }}
{% endif %}{% endfor %}{% else %}{{ message['role'] + ': ' + message['content'] }}{% endif %}{% endfor %}"""
EVERYTHING = (
    "{% for message in messages %}{{ message | dictsort }}{% endfor %}{{ tools | tojson }}{{ enable_thinking }}"
)


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        *((template, '{"at": "<é>", "n": 1}') for template in (QWEN, DEEPSEEK, EVERYTHING)),
        *((EVERYTHING, arguments) for arguments in ('"{}"', '"text"', "null")),
    ],
)
def test_a_logged_chat_with_tools_is_rendered_as_it_was_served(folder, template, arguments):
    function = CALL["tool_calls"][0]["function"] | {"arguments": arguments}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    submitted = {
        "model": "m",
        "messages": [
            SYSTEM, USER, CALL | {"tool_calls": [{"id": "a1B2c3D4e", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "a1B2c3D4e", "content": "found"}, {"role": "user", "content": parts},
        ],
        "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    body = ChatRequest.model_validate(submitted)
    served = prompts_of(folder, template).text(
        [message.model_dump(exclude_none=True) for message in body.messages],
        [tool.as_sent() for tool in body.offered_tools],
        body.chat_template_kwargs,
    )
    assert "look" in served
    chat = chat_of(submitted["messages"], submitted)
    assert ChatFormatter(folder).prompt_text(chat) == served
