"""Chat messages as the text that a model sees, by the template in its folder."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from drafter_service.warm.faults import RecordError
from drafter_service.warm.messages import Chat, Message, plain_text

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
REFUSED = "messages that the model's chat template refuses"


class ChatTemplate:
    """The template of a model folder; without one, messages are put one after the other."""

    def __init__(self, folder: Path) -> None:
        config = _config(folder)
        self._names = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
        self._template: Any = None
        self.note: str | None = None
        """Why there is no template, for the user."""
        self.was_missed = False
        """Whether there were messages to put through one."""
        source = _source(folder, config)
        if source is None:
            self.note = f"{folder} has no chat template; the messages of a prompt are put one after the other"
            return
        try:
            self._template = _compiled(source)
        except ImportError:
            self.note = "jinja2 is not installed; the messages of a prompt are put one after the other"
        except Exception as problem:  # Whatever a foreign template may do.
            self.note = f"the chat template of {folder} is refused ({problem}); messages are put one after the other"

    def prompt_text(self, chat: Chat) -> str:
        """What the model sees before it answers. Raises RecordError."""
        if self._template is None:
            self.was_missed = True
            return "".join(f"{plain_text(message)}\n" for message in chat.messages)
        return self._render(chat, True)

    def reply_text(self, chat: Chat | None, message: Message) -> str:
        """What the model wrote if it was read as `message` after `chat`. Raises RecordError."""
        if self._template is None or chat is None:
            return plain_text(message)
        prompt = self._render(chat, True)
        whole = self._render(chat._replace(messages=[*chat.messages, message]), False)
        return whole[len(prompt) :] if whole.startswith(prompt) else plain_text(message)

    def _render(self, chat: Chat, expects_answer: bool) -> str:
        try:
            text = self._template.render(
                messages=chat.messages, tools=chat.tools, add_generation_prompt=expects_answer, **self._names
            )
        except Exception:  # Templates raise what they like about messages, and say their content.
            raise RecordError(REFUSED) from None
        return str(text)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _compiled(source: str) -> Any:
    """As transformers compiles them: in a sandbox, with the few names that templates count on."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A tag around what a model writes, which matters to training only."""

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
    return environment.from_string(source)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise ValueError(message)
