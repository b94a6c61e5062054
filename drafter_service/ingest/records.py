"""Find outputs and their prompts in one record of a log, from JSON or a table row.

Only the formats of records are handled here, not tokenizers, files or positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import orjson

from drafter_service.ingest.chats import Chat, Reply, chat_of, reply_of
from drafter_service.ingest.documents import Part, RecordError
from drafter_service.ingest.origins import FIELDS
from ssd.corpus.ring import MAX_TOKEN_ID, SEPARATOR

Record = dict[str, Any]

PROMPT_IDS = ("prompt_token_ids", "input_ids")
OUTPUT_IDS = ("completion_token_ids", "output_token_ids", "output_ids", "token_ids")
WHOLE_IDS = ("tokens", "input_ids")
PROMPTS = ("prompt", "question", "input")
OUTPUTS = ("completion", "response", "output", "answer")
CONVERSATIONS = ("messages", "conversations")
EXCHANGE = ("request", "response", "body", "choices", "id", "request_id", "tools", "chat_template_kwargs")
KNOWN = frozenset(
    (*PROMPT_IDS, *OUTPUT_IDS, *WHOLE_IDS, *PROMPTS, *OUTPUTS, *CONVERSATIONS, *EXCHANGE, "text", "messages", *FIELDS)
)
"""Names of all fields that are read."""

SEPARATOR_BYTES = SEPARATOR.tobytes()

NOT_A_RECORD = "not a JSON object"
NO_OUTPUT = "no output in any known field"
BAD_IDS = f"token ids that are not integers from 0 to {MAX_TOKEN_ID:,}"
NO_FIELD = "a field of --field is missing, or neither text nor token ids"


class Found(NamedTuple):
    """An output in a record."""

    output: Part | Reply
    prompt: Part | Chat | None = None
    request: str | None = None
    """Name of the request in the log."""


def find_outputs(record: object, fields: tuple[str, ...] = ()) -> list[Found]:
    """Return all outputs of a record, at least one. `fields`: fields to read, the output last; empty: the known ones.

    Raises RecordError if there is no output.
    """
    if not isinstance(record, dict):
        raise RecordError(NOT_A_RECORD)
    if fields:
        return [_from_fields(record, fields)]
    for read in (_exchange, _token_columns, _text_columns, _conversation, _whole):
        if found := list(read(record)):
            return found
    raise RecordError(NO_OUTPUT)


def is_conversation(found: list[Found]) -> bool:
    """Return whether the outputs of a record are turns of one conversation, and not answers to the same prompt."""
    return len({len(one.prompt.messages) if isinstance(one.prompt, Chat) else 0 for one in found}) > 1


def _exchange(record: Record) -> Iterator[Found]:
    """Yield the outputs of a request to an OpenAI-compatible service with its answer, or only the answer."""
    answer = _body(record.get("response")) or record
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return
    request = _body(record.get("request")) or _body(record.get("body")) or record
    name = record.get("request_id") or answer.get("id")
    for index, choice in enumerate(choices):
        if isinstance(choice, dict) and (output := _output_of(choice)) is not None:
            prompt = _prompt_of(request, answer, choice, index, len(choices))
            yield Found(output, prompt, name if isinstance(name, str) and name else None)


def _body(value: object) -> Record | None:
    """Return an object that may be encoded as a JSON string, or be the field `body` of another object."""
    value = _parsed(value)
    if not isinstance(value, dict):
        return None
    inner = _parsed(value.get("body"))
    return inner if isinstance(inner, dict) else value


def _parsed(value: object) -> object:
    if isinstance(value, str) and value.startswith("{"):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def _output_of(choice: Record) -> Part | Reply | None:
    ids = _ids(choice.get("token_ids"))
    return ids if ids is not None else reply_of(choice.get("message")) or _text(choice.get("text"))


def _prompt_of(request: Record, answer: Record, choice: Record, index: int, choices: int) -> Part | Chat | None:
    for source in (choice, answer, request):
        if (ids := _ids(source.get("prompt_token_ids"))) is not None:
            return ids
    chat = chat_of(request.get("messages"), request)
    if chat is not None:
        return chat
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        # Several prompts, each with the same number of choices.
        number = choice.get("index")
        number = number if isinstance(number, int) else index
        prompt_index = number // max(1, choices // len(prompt))
        prompt = prompt[prompt_index] if 0 <= prompt_index < len(prompt) else None
    return _part(prompt)


def _token_columns(record: Record) -> Iterator[Found]:
    output = _first_ids(record, OUTPUT_IDS)
    if output is not None:
        yield Found(output, _first_ids(record, PROMPT_IDS))


def _text_columns(record: Record) -> Iterator[Found]:
    for name in OUTPUTS:
        value = record.get(name)
        output = _last_reply(value) or _part(value) if isinstance(value, list) else _text(value)
        if output is not None:
            prompts = (_part_or_chat(record.get(key)) for key in (*PROMPTS, *CONVERSATIONS))
            yield Found(output, next((prompt for prompt in prompts if prompt is not None), None))
            return


def _conversation(record: Record) -> Iterator[Found]:
    """Yield each message of the assistant as an output, with all messages before it as its prompt."""
    for name in CONVERSATIONS:
        chat = chat_of(record.get(name), record)
        if chat is None:
            continue
        for index, message in enumerate(chat.messages):
            reply = reply_of(message) if message["role"] == "assistant" else None
            if reply is not None:
                yield Found(reply, chat._replace(messages=chat.messages[:index]) if index else None)
        return


def _whole(record: Record) -> Iterator[Found]:
    ids = _first_ids(record, WHOLE_IDS)
    output = ids if ids is not None else _text(record.get("text"))
    if output is not None:
        yield Found(output)


def _from_fields(record: Record, fields: tuple[str, ...]) -> Found:
    parts = [_part(_dig(record, field)) for field in fields]
    *before, output = parts
    if output is None or any(part is None for part in before):
        raise RecordError(NO_FIELD)
    texts = [part for part in before if isinstance(part, str)]
    tokens = [part for part in before if isinstance(part, np.ndarray)]
    if texts and tokens:
        raise RecordError(NO_FIELD)
    prompt: Part | None = "\n".join(texts) if texts else np.concatenate(tokens) if tokens else None
    return Found(output, prompt)


def _dig(record: Record, field: str) -> object:
    """Return the value of a field such as "answer" or "meta.answer"."""
    value: object = record
    if field in record:
        return record[field]
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _last_reply(messages: list[object]) -> str | Reply | None:
    return reply_of(messages[-1]) if messages else None


def _part(value: object) -> Part | None:
    ids = _ids(value)
    return ids if ids is not None else _text(value)


def _part_or_chat(value: object) -> Part | Chat | None:
    part = _part(value)
    return part if part is not None else chat_of(value)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _first_ids(record: Record, names: tuple[str, ...]) -> np.ndarray | None:
    columns = (_ids(record.get(name)) for name in names)
    return next((ids for ids in columns if ids is not None), None)


def _ids(value: object) -> np.ndarray | None:
    """Return token ids, uint32 [N]; None if the value is not a list of numbers. Raises RecordError for invalid ids."""
    if isinstance(value, np.ndarray):
        return token_ids(value) if len(value) else None
    if not isinstance(value, list) or not value or not isinstance(value[0], (int, float)):
        return None
    try:
        data = array("I", value).tobytes()
    except (TypeError, OverflowError):
        raise RecordError(BAD_IDS) from None
    ids = np.frombuffer(data, np.uint32)
    # Searching its bytes takes a tenth of the time of comparing numbers.
    return token_ids(ids) if SEPARATOR_BYTES in data else ids


def token_ids(values: np.ndarray) -> np.ndarray:
    """Return numbers [N] as token ids, uint32. Raises RecordError for invalid ids."""
    if values.dtype.kind not in "iu" or (len(values) and not 0 <= values.min() <= values.max() <= MAX_TOKEN_ID):
        raise RecordError(BAD_IDS)
    return values.astype(np.uint32, copy=False)
