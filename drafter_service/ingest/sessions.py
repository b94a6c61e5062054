"""Formats whose answers take several records: streamed chunks, events of agents' sessions, and aider's chat history."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from drafter_service.ingest import chats
from drafter_service.ingest.answers import WHOLE, Found, Streamed, deltas_of, either, exchange
from drafter_service.ingest.bodies import BROKEN_STREAM
from drafter_service.ingest.chats import ASSISTANT, SYSTEM, TOOL, USER, Chat, Message, messages_of, reply_to, words
from drafter_service.ingest.documents import SESSIONS

Event = Mapping[str, Any]

OTHERS = frozenset(words("prompt question messages choices response completion output conversations"))
"""Fields of records that are more than a message or an event."""
REQUESTS = frozenset(words("contents request messages prompt"))
"""Fields of responses of Gemini that are not chunks."""
BRANCHES = words("isSidechain agentId parent_tool_use_id thread_id threadId")
"""Fields that tell the conversations of a session apart."""
BEGINS = ("message_start", "message-start", "messageStart")
"""Events with which a stream of Anthropic, Cohere or Bedrock begins."""
CLAUDE_FIELDS = frozenset(words("sessionId session_id leafUuid messageId"))
CLAUDE_EVENTS = frozenset(
    words(
        "system summary result progress stream_event attachment file-history-snapshot queue-operation last-prompt"
        " ai-title custom-title agent-name pr-link"
    )
)
"""Types of Claude Code's events that are no messages, and fields of which they have one."""
PARTS = frozenset(words("tool_id delta processed_at"))
"""Fields of events with a part of an answer, of Gemini CLI and managed agents."""
CODEX_EVENTS = frozenset(words("response_item session_meta turn_context event_msg compacted"))
ACTION_TEXTS = words("content message final_thought thought")
ACTION_ARGUMENTS = words("command code path content url browser_actions")
"""Arguments of OpenHands' actions: texts of messages, and arguments of calls."""
MAX_MESSAGES = 1000
"""Messages before an answer that are kept."""
NO_ANSWER = "a conversation without an answer"
UNNAMED = "chunks or responses of Gemini without responseId: nothing tells where an answer ends"


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

    @staticmethod
    def key_of(value: Event) -> Hashable | None:
        """Return what the chunks of one response have in common; None for other records, and those of Gemini."""
        kind = value.get("type")
        if isinstance(kind, str) and kind.startswith("response."):
            return "response"
        if ("candidates" in value and "choices" not in value) or deltas_of(value) is None:
            return None
        known = value.get("id") or value.get("model") if "choices" in value or "done" in value else None
        return known if isinstance(known, str) else "", str(value.get("request_id"))

    def __init__(self, name: str, first: Record) -> None:
        """name: name of the format; first: the first record."""
        self._name = name
        self.first = first
        self.is_finished = False
        """Whether no further record belongs to it."""
        self.is_broken = False
        """Whether chunks may be missing."""
        self._streamed = Streamed()

    def add(self, record: Record) -> Iterator[Read]:
        """Add a record, and yield the answers that it completes, or that ended without their last event."""
        if record is not self.first and (record.value.get("type") in BEGINS or BEGINS[-1] in record.value):
            yield from self.finish()
            self.first, self.is_broken, self._streamed = record, False, Streamed()
        self.is_finished = self._streamed.add(record.value)
        self.is_broken &= record.value.get("type") not in WHOLE
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


class GeminiStream(Stream):
    """Chunks of Gemini. In its first versions they have no id, and each has a `finishReason`."""

    _is_unclear = False
    """Whether there are several without an id."""

    @staticmethod
    def key_of(value: Event) -> Hashable | None:
        """Return the id of the response that a chunk of Gemini is from, "" without one; None for whole responses."""
        if not isinstance(value.get("candidates"), list) or deltas_of(value) is None:
            return None
        if known := either(value, "responseId"):
            return str(known)
        # Responses with their requests are whole, and so are those of PaLM, which have other fields.
        answers = [one for one in value["candidates"] if isinstance(one, dict)]
        contents = [one.get("content", {} if "finishReason" in one else None) for one in answers]
        is_whole = any(not isinstance(content, dict) or content.keys() - {"role", "parts"} for content in contents)
        return None if is_whole or not contents or not REQUESTS.isdisjoint(value) else ""

    def add(self, record: Record) -> Iterator[Read]:  # noqa: D102
        if either(record.value, "responseId"):
            yield from super().add(record)
        elif record is self.first:
            self._streamed.add(record.value)
        else:
            yield Read(record, self._name, [], [UNNAMED])
            self._is_unclear = True

    def finish(self) -> Iterator[Read]:  # noqa: D102
        yield from [Read(self.first, self._name, [], [UNNAMED])] if self._is_unclear else super().finish()


class Session:
    """Messages and events of an agent's session. The prompt of each answer is what came before it."""

    is_finished = is_broken = False

    @staticmethod
    def key_of(value: Event) -> Hashable | None:
        """Return the ids of the session that a message or event is from; None for other records."""
        kind = str(value.get("type"))
        is_event = (
            _is_item(value)
            or ("payload" in value and kind in CODEX_EVENTS)
            or value.get("record_type") == "state"
            or (kind in ("tool_use", "tool_result") and "tool_id" in value)
        )
        if not is_event and OTHERS.isdisjoint(value):
            source, _, event = kind.partition(".")
            is_event = event != "" and isinstance(value.get("data"), dict) and source in (*chats.ROLES, "session")
            # With `role` and `type` it is a response, or an item of one, unless it has a text of its own.
            is_single = "role" not in value or "type" not in value or "text" in value
            is_single = is_single or isinstance(value.get("content"), str)
            is_message = is_single and chats.role_of(value) in chats.ROLES.values()
            is_event = is_event or is_message or _is_note(value)
        session = next((value[name] for name in SESSIONS if value.get(name) is not None), None)
        return tuple(map(str, [session, *map(value.get, BRANCHES)])) if is_event else None

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

    def add(self, record: Record) -> Iterator[Read]:
        """Add a record, and yield the answer that it completes. A system prompt begins another conversation."""
        self._event = record if self._answer is None else self._event
        known, messages = self._messages(record.value)
        for message in messages:
            is_answer = message["role"] == ASSISTANT
            if message["role"] != TOOL and reply_to(message) is None:
                continue
            if is_answer and self._answer is not None and known == self._id:
                is_piece = record.value.get("delta") is True  # Gemini CLI
                self._answer = chats.joined(self._answer, message, "" if is_piece else "\n")
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

    def _messages(self, event: Event) -> tuple[object, list[Message]]:
        """Return the messages of an event, and the id of the response that they are from.

        Several items of the Responses API are one answer.
        """
        item, kind, inner = event.get("payload", event), event.get("type"), event.get("message")
        if kind == "session_meta" and isinstance(item, dict):  # Codex
            instructions = item.get("instructions") or item.get("base_instructions")
            return None, messages_of({"role": SYSTEM, "content": instructions}, []) if instructions else []
        if _is_note(event) or event.get("isApiErrorMessage") or ("payload" in event and kind != "response_item"):
            return None, []
        if "payload" in event or _is_item(event):
            return None, messages_of(item, self._skipped)
        inner = inner if isinstance(inner, dict) else {}
        is_part = not PARTS.isdisjoint(raw if isinstance(raw := event.get("raw"), dict) else event)
        known = inner.get("id") or event.get("requestId") or (None if is_part else object())
        return known, [] if inner.get("model") == "<synthetic>" else messages_of(event, self._skipped)


class Actions(Session):
    """Events of OpenHands."""

    @staticmethod
    def key_of(value: Event) -> Hashable | None:
        """Return "" for an event of OpenHands; None for other records."""
        is_event = isinstance(value.get("args"), dict) or isinstance(value.get("observation"), str)
        return "" if is_event and not OTHERS & value.keys() else None

    def _messages(self, event: Event) -> tuple[object, list[Message]]:
        """Read an action of the agent or of the user, or an observation, of OpenHands."""
        action, args = event.get("action"), event.get("args")
        args = args if isinstance(args, dict) else event
        if not isinstance(action, str):
            content = event.get("content")
            is_result = isinstance(content, str) and "observation" in event
            return None, [{"role": TOOL, "content": content}] if is_result else []
        texts = [value for name in ACTION_TEXTS if isinstance(value := args.get(name), str) and value]
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
        arguments = {name: args[name] for name in ACTION_ARGUMENTS if args.get(name)}
        calls = [{"name": action, "arguments": arguments}] if arguments else []
        return None, messages_of({"content": args.get("thought"), "tool_calls": calls}, self._skipped, ASSISTANT)


def _is_item(value: Event) -> bool:
    """Return whether an event is an item of the Responses API."""
    kind, content = value.get("type"), value.get("content")
    part = content[0] if kind == "message" and isinstance(content, list) and content else None
    is_message = isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
    return is_message or chats.item_role(kind) is not None


def _is_note(event: Event) -> bool:
    """Return whether an event of Claude Code is no message."""
    return str(event.get("type")) in CLAUDE_EVENTS and not CLAUDE_FIELDS.isdisjoint(event)


# --- aider

AIDER_BEGINS = "# aider chat started at"
AIDER_COMMANDS = re.compile(r"!|/(?!(ask|code|architect|help|context)\b)")
"""Lines of the user after which aider writes the output of a command, and not an answer of the model."""


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
