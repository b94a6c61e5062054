"""Formats whose answers take several records: streamed chunks, events of agents' sessions, and aider's chat history."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from drafter_service.ingest import chats
from drafter_service.ingest.answers import BROKEN_STREAM, Found, Streamed, deltas_of, exchange
from drafter_service.ingest.chats import ASSISTANT, SYSTEM, TOOL, USER, Chat, Message, messages_of, reply_to, words

Event = Mapping[str, Any]

OTHERS = frozenset(words("prompt question messages choices response completion output conversations"))
"""Fields of records that are more than a message or an event."""
CLAUDE_EVENTS = frozenset(
    words("system summary result progress stream_event attachment file-history-snapshot queue-operation")
)
"""Types of Claude Code's events that are no messages."""
MAX_MESSAGES = 1000
"""Messages before an answer that are kept."""
NO_ANSWER = "a conversation without an answer"


class Record(NamedTuple):
    """A value of a log."""

    value: Any
    """A decoded JSON value, or a row of a table; columns of token ids may be arrays, uint32 or int64 [N]."""
    place: str
    """FILE:NUMBER of the line, row or element."""


class Unread(NamedTuple):
    """Stands for a value of a log that cannot be read."""

    reason: str
    breaks_streams: bool
    """Whether it may have been a chunk of a response."""


class Read(NamedTuple):
    """Contents of a record, or of several that belong together."""

    record: Record
    """The (first) record."""
    format: str
    """Name in the table of formats; "" if none fits."""
    outputs: list[Found]
    skipped: list[str]
    """The reason for each part that is left out."""


class Stream:
    """Chunks of a response."""

    def __init__(self, name: str, first: Record) -> None:
        """name: name of the format; first: the first record."""
        self.first = first
        self.is_finished = False
        """Whether no further record belongs to it."""
        self.is_broken = False
        """Whether chunks may be missing."""
        self._name = name
        self._streamed = Streamed()

    @staticmethod
    def key_of(value: Event) -> Hashable | None:
        """Return what the records of one response have in common; None for records of other formats."""
        kind = value.get("type")
        if isinstance(kind, str) and kind.startswith("response."):
            return "response"
        if "candidates" in value and "choices" not in value:
            known = value.get("responseId", "" if "usageMetadata" in value else None)
            return known if isinstance(known, str) else None
        known = value.get("id") or value.get("model")
        return None if deltas_of(value) is None else known if isinstance(known, str) else ""

    def add(self, record: Record) -> Iterator[Read]:
        """Add a record, and yield the answers that it completes."""
        self.is_finished = self._streamed.add(record.value)
        self.is_broken &= record.value.get("type") != "response.completed"  # It repeats all chunks.
        if self.is_finished:
            yield from self.finish()

    def finish(self) -> Iterator[Read]:
        """Yield the answers, whose end may be missing."""
        if self.is_broken:
            yield Read(self.first, self._name, [], [BROKEN_STREAM])
            return
        skipped: list[str] = []
        first = self.first.value
        found = exchange(first, self._streamed.response(), skipped, first.get("request_id", first.get("id")))
        is_usage = first.get("choices") == [] or first.get("usage")  # After the answer
        if found or skipped or not is_usage:
            yield Read(self.first, self._name, found, skipped if found or skipped else [NO_ANSWER])


class Session:
    """Events of an agent's session. The prompt of each answer is what came before it. Subclasses read one format."""

    is_finished = is_broken = False

    def __init__(self, name: str, first: Record) -> None:
        """name: name of the format; first: the first record."""
        self.first = first
        self._name = name
        self._has_read = False
        self._before: list[Message] = []
        self._answer: Message | None = None
        self._event = first
        """The one with the beginning of the answer, or the last one."""
        self._id: object = None
        """Id of the response that the last answer is from."""
        self._skipped: list[str] = []

    @staticmethod
    def key_of(value: Event) -> Hashable | None:
        """Return what the events of one session have in common; None for records of other formats."""
        raise NotImplementedError

    def messages(self, event: Event) -> tuple[object, list[Message]]:
        """Return the id of the response that an event is from, if it has one, and the event's messages."""
        raise NotImplementedError

    def add(self, record: Record) -> Iterator[Read]:
        """Add a record, and yield the answer that it completes. A system prompt begins another conversation."""
        self._event = record if self._answer is None else self._event
        known, messages = self.messages(record.value)
        for message in messages:
            is_answer = message["role"] == ASSISTANT
            if message["role"] != TOOL and reply_to(message) is None:
                continue
            if is_answer and self._answer is not None and known == self._id:
                self._answer = chats.joined(self._answer, message)
                continue
            yield from self._completed()
            if is_answer:
                self._answer, self._id, self._event = message, known, record
            else:
                self._before = [] if message["role"] == SYSTEM else self._before
                self._before.append(message)

    def finish(self) -> Iterator[Read]:
        """Yield the last answer, or that there was none."""
        yield from self._completed()
        if self._before and not self._has_read:
            yield Read(self.first, self._name, [], [NO_ANSWER])

    def _completed(self) -> Iterator[Read]:
        found = []
        if self._answer is not None and (output := reply_to(self._answer)) is not None:
            prompt, name = self._before[-MAX_MESSAGES:], self._event.value.get("uuid")
            found.append(Found(output, Chat(prompt) if prompt else None, name if isinstance(name, str) else None))
            self._before = [*self._before[-2 * MAX_MESSAGES :], self._answer]
        if found or self._skipped:
            self._has_read = True
            yield Read(self._event, self._name, found, self._skipped)
        self._answer, self._skipped = None, []


class Messages(Session):
    """Messages of conversations, one per record."""

    @staticmethod
    def key_of(value: Event) -> Hashable | None:  # noqa: D102
        # With `role` and `type` it is a response, or an item of one, unless it has a text of its own.
        is_message = chats.role_of(value) in chats.ROLES.values() and not OTHERS & value.keys()
        is_single = not {"role", "type"} <= value.keys() or "text" in value
        source, _, event = str(value.get("type")).partition(".")
        is_event = event != "" and isinstance(value.get("data"), dict) and source in (*chats.ROLES, "session")
        return "" if is_event or (is_message and is_single) else None

    def messages(self, event: Event) -> tuple[object, list[Message]]:  # noqa: D102
        return object(), messages_of(event, self._skipped)


class ClaudeCode(Session):
    """Sessions of Claude Code, and what it writes as stream-json."""

    @staticmethod
    def key_of(value: Event) -> Hashable | None:  # noqa: D102
        names = ("sessionId", "session_id", "isSidechain", "agentId", "parent_tool_use_id")
        has_message = value.get("type") in (USER, ASSISTANT) and isinstance(value.get("message"), dict)
        is_event = has_message or (str(value.get("type")) in CLAUDE_EVENTS and not OTHERS & value.keys())
        return tuple(str(value.get(name)) for name in names) if is_event else None

    def messages(self, event: Event) -> tuple[object, list[Message]]:  # noqa: D102
        message = event.get("message")
        if not isinstance(message, dict) or message.get("model") == "<synthetic>" or event.get("isApiErrorMessage"):
            return None, []
        fields = {"role": event["type"], "content": message.get("content")}
        known = message.get("id") or event.get("requestId") or object()
        return known, messages_of(fields, self._skipped) if event["type"] in (USER, ASSISTANT) else []


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
        return "" if is_event or is_message or chats.item_role(kind) or value.get("record_type") == "state" else None

    def messages(self, event: Event) -> tuple[object, list[Message]]:  # noqa: D102
        item, kind = event.get("payload", event), event.get("type")
        if kind == "session_meta" and isinstance(item, dict):
            instructions = item.get("instructions") or item.get("base_instructions")
            return None, messages_of({"role": SYSTEM, "content": instructions}, []) if instructions else []
        return None, messages_of(item, self._skipped) if "payload" not in event or kind == "response_item" else []


class OpenHands(Session):
    """Events of OpenHands: actions of the agent and of the user, and observations."""

    TEXTS = ("content", "message", "final_thought", "thought")
    ARGUMENTS = ("command", "code", "path", "content", "url", "browser_actions")

    @staticmethod
    def key_of(value: Event) -> Hashable | None:  # noqa: D102
        is_event = isinstance(value.get("args"), dict) or isinstance(value.get("observation"), str)
        return "" if is_event and not OTHERS & value.keys() else None

    def messages(self, event: Event) -> tuple[object, list[Message]]:  # noqa: D102
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
        if isinstance(response, dict) and isinstance(choices := response.get("choices"), list) and choices:
            # Each tool call of a response is an event with the whole response.
            known = response.get("id")
            message = choices[0].get("message") if isinstance(choices[0], dict) and known != self._id else None
            return known, messages_of(message, self._skipped, ASSISTANT)
        if action in ("message", "finish", "think"):
            return None, [{"role": ASSISTANT, "content": "".join(texts[:1])}]
        arguments = {name: args[name] for name in self.ARGUMENTS if args.get(name)}
        calls = [{"name": action, "arguments": arguments}] if arguments else []
        return None, messages_of({"content": args.get("thought"), "tool_calls": calls}, self._skipped, ASSISTANT)


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
