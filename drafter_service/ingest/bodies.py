"""Bodies of requests and responses as logs have them: objects, JSON, streams of events, and recorded HTTP."""

from __future__ import annotations

import re
from base64 import b64decode
from typing import Any

from drafter_service.ingest import chats
from drafter_service.ingest.chats import AROUND_JSON, ASSISTANT, Message, parsed, words
from drafter_service.ingest.documents import RecordError

NO_DATA = re.compile(r"\s*(:|(event|id|retry):)")
"""Beginning of a line of server-sent events that has no JSON."""
STREAM = re.compile(rf"\ufeff?({NO_DATA.pattern}.*\n)*\s*data:")
"""Beginning of a stream of server-sent events."""
VALUE = r"""(?:"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'|[\w.+-]+)"""
BROKEN = re.compile(
    rf"""\ufeff?[\s\[]*\{{\s*(?:["']\w+["']\s*:\s*{VALUE}\s*,\s*)*["'](?:"""
    r"""object["']\s*:\s*["'](?:chat\.completion|text_completion|response\b|error\b)"""
    r"""|role["']\s*:\s*["'](?:assistant|model|user|system|developer|tool)["']"""
    r"""|(?:choices|candidates)["']\s*:\s*\[\s*\{\s*["'](?:index|message|delta|finish_?[rR]eason|content["']\s*:\s*\{)"""
    r"""|(?:messages|contents)["']\s*:\s*\[\s*\{\s*["'](?:role|parts|content|type)["']"""
    r"""|message["']\s*:\s*\{\s*["']role["']"""
    r"""|error["']\s*:\s*\{\s*["'](?:message|code|type)["'])"""
)
"""Beginning of a body of an API, after fields that are neither objects nor lists."""
OBJECTS = re.compile(r"chat\.completion(\.chunk)?|text_completion|response|thread\..+|list|error")
"""Values of the field `object` in bodies."""
REASONS = frozenset(words("finish_reason finishReason stop_reason stopReason done_reason"))
"""Fields that say why an answer ended."""
IN_ANSWERS = ("message", "delta", "content")
"""Objects in OpenAI's choices and Gemini's candidates."""
OF_MESSAGES = frozenset((*chats.CONTENTS, *chats.CALLS_BESIDE))
OF_RESPONSES = frozenset(words("model created usage"))
"""Fields of responses with choices; quizzes that a model wrote have none of them."""
OF_ERRORS = frozenset(words("error type request_id user_id"))
"""Fields of responses with an error."""
INNER = ("message", "output", "body")
"""Fields of bodies with another one, or a message."""
BODIES = ("body", "inputBodyJson", "outputBodyJson", "__data__", "body_segments")
"""Fields of requests and responses with their bodies: Bedrock's, and those of recorded objects of pydantic and Gemini's
library."""
CONTENTS = ("content", "postData")
"""Fields with their bodies beside `headers`."""
BODY_TEXTS = words("data text string base64_string")
"""Fields of recorded bodies with their text."""
RECORDED = frozenset(words("encoding mimeType string base64_string"))
"""Fields of which recorded bodies have one."""

BROKEN_STREAM = "a streamed answer with chunks that cannot be read"
BROKEN_BODY = "the body of a request or response that is cut off or not JSON"


def body_of(value: object) -> object:
    """Return a body that may be a JSON string, a recorded stream of events, or the field `body` of another object.

    A text that is no body is returned as it is, also JSON that a model wrote. Raises RecordError for a broken body.
    """
    decoded = value
    if isinstance(value, list) and value and isinstance(value[0], dict) and "__data__" in value[0]:
        return [body_of(one) for one in value]
    if isinstance(value, str):
        if STREAM.match(value):
            return _events_in(value) or value
        decoded = parsed(value)
        if not is_body(decoded):
            if decoded is value and BROKEN.match(value):
                raise RecordError(BROKEN_BODY)
            return value
    if not isinstance(decoded, dict):
        return decoded
    texts = [text for name in BODY_TEXTS if isinstance(text := decoded.get(name), str)]
    if texts and not RECORDED.isdisjoint(decoded):
        is_encoded = decoded.get("encoding") == "base64" or "base64_string" in decoded
        body = body_of(parsed(_text_of(texts[0]) if is_encoded else texts[0]))
        return body if isinstance(body, dict | list) else decoded
    for name in (*BODIES, *(CONTENTS if "headers" in decoded else ())):
        body = body_of(parsed(decoded.get(name)))
        if isinstance(body, dict) and name in CONTENTS and "mimeType" in body and body.get("encoding") != "base64":
            return {}  # A page, such as that of an error
        if isinstance(body, dict | list):
            return body[0] if name == "body_segments" and isinstance(body, list) and len(body) == 1 else body
    return decoded


def request_of(value: object, skipped: list[str]) -> object:
    """Return the body of a request; [] if it is broken, for which `skipped` gets the reason."""
    try:
        return body_of(value)
    except RecordError as problem:
        skipped.append(str(problem))
        return []


def is_body(value: object) -> bool:
    """Return whether decoded JSON is a body of an API, a message, or a list of these or of parts.

    False for what a model may have written.
    """
    if isinstance(value, list):
        return value != [] and (is_body(value[0]) or chats.are_parts(value))
    if not isinstance(value, dict):
        return False
    messages: Any = value.get("messages")
    role, error = value.get("role"), value.get("error")
    answer = _first(value, "choices") or _first(value, "candidates")
    # A dialogue alone, which ends with an answer, is synthetic data; a request ends with a question.
    is_request = chats.is_chat(messages) and (len(value) > 1 or chats.role_of(messages[-1]) != ASSISTANT)
    return (
        is_request
        or not REASONS.isdisjoint(value)
        or OBJECTS.fullmatch(str(value.get("object"))) is not None
        or (isinstance(role, str) and role.lower() in chats.ROLES and not OF_MESSAGES.isdisjoint(value))
        or (isinstance(error, dict) and "message" in error and value.keys() <= OF_ERRORS)
        or not REASONS.isdisjoint(answer)
        or any(isinstance(answer.get(name), dict) for name in IN_ANSWERS)
        or ("text" in answer and (len(value) == 1 or not OF_RESPONSES.isdisjoint(value)))
        or "text" in _first(value, "generations")
        or "parts" in _first(value, "contents")
        or any(is_body(parsed(value.get(name))) for name in INNER)
    )


def _first(value: Message, name: str) -> Message:
    """Return the first object in a field with a list of objects, or of lists of them; {} for others."""
    inner: Any = value.get(name)
    while isinstance(inner, list) and inner:
        inner = inner[0]
    return inner if isinstance(inner, dict) else {}


def _events_in(text: str) -> list[Message]:
    """Return the events of a stream; [] if the text is not one. Raises RecordError if one of them cannot be read."""
    lines = [line.strip(AROUND_JSON).removeprefix("data:").strip() for line in text.split("\n")]
    data = [line for line in lines if "{" in line and not NO_DATA.match(line)]
    read = [event for event in map(parsed, data) if isinstance(event, dict)]
    if len(read) < len(data) and (read or any(line.startswith('{"') for line in data)):
        raise RecordError(BROKEN_STREAM)
    return read


def _text_of(encoded: str) -> str:
    """Return a text that is encoded in base64; "" for other bytes."""
    try:
        return b64decode(encoded).decode()
    except ValueError:
        return ""
