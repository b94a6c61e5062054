"""Formats whose answers take several records: streamed chunks, events of agents' sessions, and aider's chat history."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from drafter_service.ingest.answers import Found, Streamed, deltas_of, exchange, prompt_of
from drafter_service.ingest.chats import (
    ASSISTANT,
    ROLES,
    SYSTEM,
    TOOL,
    USER,
    Chat,
    Message,
    item_role,
    joined,
    messages_of,
    reply_to,
    role_of,
    words,
)

Event = Mapping[str, Any]

OTHERS = frozenset(words("prompt question messages choices response completion output conversations"))
"""Fields of records that are more than a message or an event."""
CLAUDE_EVENTS = frozenset(
    words("system summary result progress stream_event attachment file-history-snapshot queue-operation")
)
"""Types of Claude Code's events that are no messages."""
MAX_MESSAGES = 1000
"""Messages before an answer that are kept."""


class Record(NamedTuple):
    """A value of a log."""

    value: object
    """A decoded JSON value, or a row of a table; columns of token ids may be arrays, uint32 or int64 [N]."""
    place: str
    """FILE:NUMBER of the line, row or element."""


class Read(NamedTuple):
    """Contents of a record, or of several that belong together."""

    record: Record
    """The (first) record."""
    format: str
    """Name in the table of formats; "" if none fits."""
    outputs: list[Found]
    skipped: list[str]
    """The reason for each part that is left out."""


class Group:
    """Records that belong together. Subclasses read one format."""

    is_finished = False
    """Whether no further record belongs to it."""
    _has_read = False

    def __init__(self, name: str, first: Record) -> None:
        """name: name of the format; first: the first record."""
        self.first = first
        self._name = name

    @staticmethod
    def key_of(value: Event) -> Hashable | None:
        """Return what the records of one group have in common; None for records of other formats."""
        raise NotImplementedError

    def add(self, record: Record) -> Iterator[Read]:
        """Add a record, and yield the answers that it completes."""
        raise NotImplementedError

    def finish(self) -> Iterator[Read]:
        """Yield the answers whose end is missing."""
        raise NotImplementedError

    @property
    def is_unanswered(self) -> bool:
        """Whether it has a request, but nothing was read from it."""
        return not self._has_read

    def _read(self, record: Record, found: list[Found], skipped: list[str]) -> Iterator[Read]:
        if found or skipped:
            self._has_read = True
            yield Read(record, self._name, found, skipped)


class Stream(Group):
    """Chunks of a response."""

    def __init__(self, name: str, first: Record) -> None:
        super().__init__(name, first)
        self._answers: dict[int, tuple[Record, Streamed]] = {}

    @staticmethod
    def key_of(value: Event) -> Hashable | None:  # noqa: D102
        kind = value.get("type")
        if isinstance(kind, str) and kind.startswith("response."):
            return "response"
        known = value.get("id") or value.get("model")
        return None if deltas_of(value) is None else known if isinstance(known, str) else ""

    def add(self, record: Record) -> Iterator[Read]:  # noqa: D102
        value = record.value
        if isinstance(value, dict) and value.get("type") == "response.completed":  # It repeats all chunks.
            skipped: list[str] = []
            found = exchange(value.get("response"), value.get("response"), skipped)
            yield from self._read(record, found, skipped)
            self.is_finished = True
        for delta in deltas_of(value) or ():
            _, answer = self._answers.setdefault(delta.number, (record, Streamed()))
            answer.add(delta.fields)
            if delta.is_last:
                yield from self._complete(delta.number)
                self.is_finished = not self._answers

    def finish(self) -> Iterator[Read]:  # noqa: D102
        for index in list(self._answers):
            yield from self._complete(index)

    def _complete(self, index: int) -> Iterator[Read]:
        record, answer = self._answers.pop(index)
        skipped: list[str] = []
        output = answer.output(skipped)
        name = record.value.get("id") if isinstance(record.value, dict) else None
        name = f"{name}/{index}" if index and name else name if isinstance(name, str) else None
        found = [] if output is None else [Found(output, prompt_of(record.value), name)]
        yield from self._read(record, found, skipped)


class Session(Group):
    """Events of an agent's session. The prompt of each answer is what came before it."""

    def __init__(self, name: str, first: Record) -> None:
        super().__init__(name, first)
        self._before: list[Message] = []
        self._answer: Message | None = None
        self._event = first
        """The one with the beginning of the answer."""
        self._id: str | None = None
        """Id of the response that the answer is from."""
        self._skipped: list[str] = []

    @property
    def is_unanswered(self) -> bool:  # noqa: D102
        return bool(self._before) and not self._has_read

    def messages(self, event: Event) -> tuple[str | None, list[Message]]:
        """Return the id of the response that an event is from, if it has one, and the event's messages."""
        raise NotImplementedError

    def add(self, record: Record) -> Iterator[Read]:  # noqa: D102
        known, messages = self.messages(record.value) if isinstance(record.value, dict) else (None, [])
        for message in messages:
            if message["role"] == ASSISTANT and self._answer is not None and known == self._id:
                self._answer = joined(self._answer, message)
                continue
            yield from self.finish()
            if message["role"] == ASSISTANT:
                self._answer, self._id, self._event = message, known, record
            else:
                self._before.append(message)

    def finish(self) -> Iterator[Read]:  # noqa: D102
        if self._answer is None:
            return
        output, event = reply_to(self._answer), self._event.value
        name = event.get("uuid") if isinstance(event, dict) else None
        prompt = Chat(self._before[-MAX_MESSAGES:]) if self._before else None
        found = [] if output is None else [Found(output, prompt, name if isinstance(name, str) else None)]
        yield from self._read(self._event, found, self._skipped)
        self._before = [*self._before[-2 * MAX_MESSAGES :], self._answer]
        self._answer, self._skipped = None, []


class Messages(Session):
    """Messages of conversations, one per record. A system prompt begins the next conversation."""

    @staticmethod
    def key_of(value: Event) -> Hashable | None:  # noqa: D102
        is_message = role_of(value) in ROLES.values() and not OTHERS & value.keys() and "type" not in value
        return "" if is_message else None

    def messages(self, event: Event) -> tuple[str | None, list[Message]]:  # noqa: D102
        self._number += 1
        return str(self._number), messages_of(event, self._skipped)

    def add(self, record: Record) -> Iterator[Read]:  # noqa: D102
        if role_of(record.value) == SYSTEM:
            yield from self.finish()
            self._before = []
        yield from super().add(record)

    _number = 0


class ClaudeCode(Session):
    """Sessions of Claude Code, and what it writes as stream-json."""

    @staticmethod
    def key_of(value: Event) -> Hashable | None:  # noqa: D102
        names = ("sessionId", "session_id", "isSidechain", "agentId", "parent_tool_use_id")
        has_message = value.get("type") in (USER, ASSISTANT) and isinstance(value.get("message"), dict)
        is_event = has_message or (str(value.get("type")) in CLAUDE_EVENTS and not OTHERS & value.keys())
        return tuple(str(value.get(name)) for name in names) if is_event else None

    def messages(self, event: Event) -> tuple[str | None, list[Message]]:  # noqa: D102
        message = event.get("message")
        if event["type"] not in (USER, ASSISTANT) or not isinstance(message, dict) or event.get("isApiErrorMessage"):
            return None, []
        if message.get("model") == "<synthetic>":
            return None, []
        known = message.get("id")
        fields = {"role": event["type"], "content": message.get("content")}
        return known if isinstance(known, str) else None, messages_of(fields, self._skipped)


class Codex(Session):
    """Sessions of Codex: items of the Responses API, as they are or as the payload of an event."""

    EVENTS = frozenset(words("response_item session_meta turn_context event_msg compacted"))

    @classmethod
    def key_of(cls, value: Event) -> Hashable | None:  # noqa: D102
        kind = value.get("type")
        content = value.get("content")
        part = content[0] if isinstance(content, list) and content else None
        is_message = kind == "message" and isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
        is_event = "payload" in value and str(kind) in cls.EVENTS
        return "" if is_event or is_message or item_role(kind) or value.get("record_type") == "state" else None

    def messages(self, event: Event) -> tuple[str | None, list[Message]]:  # noqa: D102
        item = event.get("payload", event)
        if event.get("type") == "session_meta" and isinstance(item, dict):
            instructions = item.get("instructions") or item.get("base_instructions")
            return None, messages_of({"role": SYSTEM, "content": instructions}, []) if instructions else []
        if "payload" in event and event["type"] != "response_item":
            return None, []
        return None, [read for read in messages_of(item, self._skipped) if reply_to(read) is not None]


class OpenHands(Session):
    """Events of OpenHands: actions of the agent and of the user, and observations."""

    TEXTS = ("content", "message", "final_thought", "thought")
    ARGUMENTS = ("command", "code", "path", "content", "url", "browser_actions")
    _seen = ""
    """Id of the last response: each of its tool calls is an event."""

    @staticmethod
    def key_of(value: Event) -> Hashable | None:  # noqa: D102
        is_event = isinstance(value.get("args"), dict) or isinstance(value.get("observation"), str)
        return "" if is_event and not OTHERS & value.keys() else None

    def messages(self, event: Event) -> tuple[str | None, list[Message]]:  # noqa: D102
        action, args = event.get("action"), event.get("args")
        args = args if isinstance(args, dict) else event
        if not isinstance(action, str):
            content = event.get("content")
            is_result = isinstance(content, str) and "observation" in event
            return None, [{"role": TOOL, "content": content}] if is_result else []
        texts = [value for name in self.TEXTS if isinstance(value := args.get(name), str) and value]
        source = event.get("source", USER if "wait_for_response" in event else "agent")
        if action == "system" or source != "agent":
            role = SYSTEM if action == "system" else USER
            return None, [{"role": role, "content": texts[0]}] if texts and action in ("system", "message") else []
        metadata = event.get("tool_call_metadata")
        response = metadata.get("model_response") if isinstance(metadata, dict) else None
        if isinstance(response, dict) and isinstance(response.get("choices"), list) and response["choices"]:
            known, is_new = str(response.get("id")), str(response.get("id")) != self._seen
            self._seen, choice = known, response["choices"][0]
            message = choice.get("message") if isinstance(choice, dict) and is_new else None
            return known, messages_of(message, self._skipped, ASSISTANT)
        if action in ("message", "finish", "think"):
            return None, [{"role": ASSISTANT, "content": texts[0]}] if texts else []
        arguments = {name: args[name] for name in self.ARGUMENTS if args.get(name)}
        thought = args.get("thought")
        call = {"name": action, "arguments": arguments}
        fields = {"content": thought, "tool_calls": [call] if arguments else None}
        return None, messages_of(fields, self._skipped, ASSISTANT) if arguments or thought else []


# --- aider

AIDER_BEGINS = "# aider chat started at"
AIDER_COMMANDS = re.compile(r"!|/(?!(ask|code|architect|help|context)\b)")
"""Lines of the user after which aider writes the output of a command, and not an answer of the model."""


def is_markdown_chat(head: str) -> bool:
    """Return whether the beginning of a text is that of aider's chat history."""
    return AIDER_BEGINS in head


def markdown_chat(lines: Iterable[str]) -> Iterator[object]:
    """Yield each session of aider's chat history as a value that `read_records` understands.

    Lines of the user begin with "####", those of aider itself with ">"; others, after one of the user, are the model's.
    aider's and the user's end with two blanks, unless a tool has removed them, and so differ from the model's Markdown.
    """
    turns: list[tuple[str, list[str]]] = []
    is_user = is_note = is_command = False
    end: str | None = None
    for line in lines:
        line = line.rstrip("\r\n")
        if line.startswith(AIDER_BEGINS):
            yield from _aider_session(turns)
            turns = []
            continue
        if line.startswith("#### ") and end is None:
            end = "  " if line.endswith("  ") else ""
        is_marked = line.endswith(end or "")
        was_user, is_user = is_user, line.startswith("#### ") and is_marked
        if line.startswith(">") and (is_marked or is_note):
            is_note = True
        elif is_user:
            line, is_note = line[5:].rstrip(), False
            if not was_user:
                turns.append((USER, []))
                is_command = AIDER_COMMANDS.match(line) is not None
            turns[-1][1].append(line)
        elif turns and not is_command:
            if turns[-1][0] == USER or (is_note and line):
                turns.append((ASSISTANT, []))
                is_note = False
            turns[-1][1].append(line)
    yield from _aider_session(turns)


def _aider_session(turns: list[tuple[str, list[str]]]) -> Iterator[object]:
    texts = [(role, "\n".join(lines).strip()) for role, lines in turns]
    if messages := [{"role": role, "content": text} for role, text in texts if text]:
        yield {"aider": messages}
