"""Chat templates, rendered in a sandbox as transformers does, from a model's folder.

Messages are brought into the form that templates expect here as well (`normalized`). The engine and the `warm` command
both use this module, so that the text that is learned equals the text that is served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from drafter_service.client.gguf import gguf_tokenizer_config, is_gguf
from ssd.errors import UserError, missing_extra

Message = Mapping[str, Any]

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
DEFAULT = "default"
WITH_TOOLS = "tool_use"
"""Name of the template for requests with tools, if a model has a separate one."""
CONTINUED = "\U000f0000 "
"""Text that marks the end of the message to continue: a character for private use, and a space, which templates may
remove from the end of a message."""


class RefusedMessagesError(ValueError):
    """Messages that are invalid, or that a template refuses. The text may quote them."""


class JsonObject(dict[str, Any]):
    """Arguments of a tool call. Most templates expect an object; DeepSeek's append it to a string, as JSON."""

    def __add__(self, text: str) -> str:
        return _to_json(self) + text

    def __radd__(self, text: str) -> str:
        return text + _to_json(self)


class ChatTemplate:
    """The compiled templates of one model. Thread-safe."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        """sources: templates by name; tokens: special tokens by the name that templates have for them.

        Raises the exceptions of jinja2 for invalid sources.
        """
        from jinja2.meta import find_undeclared_variables

        environment = _environment()
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        self._tokens = dict(tokens)
        self._variables = {
            name: frozenset(find_undeclared_variables(environment.parse(source))) - environment.globals.keys()
            for name, source in sources.items()
        }
        source = sources.get(WITH_TOOLS, sources[DEFAULT])
        self.tool_source = source if "tools" in self.variables(has_tools=True) else ""
        """The template for chats with tools; empty if it does not use them."""

    def variables(self, *, has_tools: bool) -> frozenset[str]:
        """Return the names of the variables that the template for chats with or without tools uses."""
        return self._variables[self._name(has_tools)]

    def _name(self, has_tools: bool) -> str:
        return WITH_TOOLS if has_tools and WITH_TOOLS in self._templates else DEFAULT

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of the model's input. Raises RefusedMessagesError.

        messages: as in OpenAI's API. continue_final_message: end the text with the content of the last message, as
        transformers does. arguments: further variables of the template, such as `enable_thinking`.
        """
        rendered = [normalized(message) for message in messages]
        if continue_final_message:
            rendered[-1]["content"] += CONTINUED
        known = {
            **self._tokens,
            **(arguments or {}),
            "messages": rendered,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = str(self._templates[self._name(tools is not None)].render(known))
        except Exception as problem:  # Templates may raise anything.
            reason = " ".join(str(problem).split()) or type(problem).__name__
            raise RefusedMessagesError(f"the model's chat template refuses the messages: {reason}") from None
        return _up_to_mark(text) if continue_final_message else text


def _up_to_mark(text: str) -> str:
    """Return the text before the last `CONTINUED`. Raises RefusedMessagesError for a text without it."""
    before, mark, after = text.rpartition(CONTINUED.strip())
    if not mark:
        raise RefusedMessagesError("the model's chat template does not show the final message, so it cannot continue")
    is_kept = after.startswith(CONTINUED[len(mark) :])
    return before if is_kept else before.rstrip()


def normalized(message: Message) -> dict[str, Any]:
    """Return a message with its content as one string, and with arguments of tool calls as objects.

    Templates expect both. Raises RefusedMessagesError for parts that are not text and arguments that are not JSON.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(map(_text_of, content))
    fields = {**message, "content": content}
    calls = fields.pop("tool_calls", None)
    if calls:
        fields["tool_calls"] = [_with_parsed_arguments(call) for call in calls] if isinstance(calls, list) else calls
    return fields


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """Return the template of a model folder or GGUF file; None if it has none.

    Raises UserError for one that cannot be used.
    """
    config = gguf_tokenizer_config(folder) if is_gguf(folder) else _config(folder)
    tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    try:
        sources = _sources(folder, config)
        return ChatTemplate(sources, tokens) if DEFAULT in sources else None
    except ImportError:
        raise missing_extra("chat templates need jinja2", "text") from None
    except Exception as problem:  # A template may raise anything.
        reason = " ".join(str(problem).split())
        raise UserError(f"the chat template of {folder} is refused ({reason}); correct it or copy it again") from None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / TEMPLATE_FILE
    if path.exists():
        return {DEFAULT: path.read_text(encoding="utf-8")}
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        return {name: source for name, source in named.items() if isinstance(name, str) and isinstance(source, str)}
    return {DEFAULT: template} if isinstance(template, str) else {}


def _token_text(value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _text_of(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RefusedMessagesError("a message has a part that is not text; only text is supported")


def _with_parsed_arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            message = "the arguments of a tool call are not JSON; send them as the model produced them"
            raise RefusedMessagesError(message) from None
    if isinstance(arguments, dict):
        arguments = JsonObject(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _environment() -> Any:
    """Return a sandbox with the few names that templates use."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A tag around the model's output, which only training uses."""

        tags = {"generation"}  # noqa: RUF012  # as the base class has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise ValueError(message)
