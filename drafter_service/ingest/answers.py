"""Outputs and prompts in requests and responses of any API, also streamed; formats.py says where records have them."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from drafter_service.ingest import chats
from drafter_service.ingest.bodies import body_of, request_of
from drafter_service.ingest.chats import ASSISTANT, Chat, Message, Reply, as_json, chat_of, parsed, reply_to, words
from drafter_service.ingest.documents import Part, RecordError
from ssd.corpus.ring import MAX_TOKEN_ID, SEPARATOR

Output = Part | Reply

PROMPT_IDS = ("prompt_token_ids", "input_ids")
OUTPUT_IDS = ("completion_token_ids", "output_token_ids", "output_ids", "token_ids")
CHATS = ("messages", "contents", "conversations", "conversation", "prompt_messages")
PROMPTS = words(
    "prompt model_input origin_prompt instruction question query problem input inputs input_text"
    " question_content chat_history user_prompt user_query request raw inputText"
)
"""Names of fields with a prompt, the most exact ones first."""
TEXTS = words(
    "turns text generated_text output_text outputText completion response generation full_model_response output answer"
)
"""Names of fields of an answer with its text."""
SAMPLES = ("choices", "candidates", "generations", "completions", "output", "messages")
"""Names of fields of a response with its answers: OpenAI, Gemini, LangChain, HELM, Responses API and Bedrock."""
ENDS = frozenset(words("stop length eos eos_token end_turn max_tokens stop_sequence tool_calls content_filter"))
"""Reasons why an answer ended, which may stand beside its text."""
HEX = re.compile("(0000|1f8b)[0-9a-f]{28,}")
"""Binary event streams and gzip as hexadecimal digits, of which recordings may have lists."""
BASE64 = re.compile(
    r"(?=[a-z\d+/]*[A-Z])(?=[A-Z\d+/]*[a-z])(?=[A-Za-z+/]*\d)(?:[A-Za-z\d+/]{4}){16,}[A-Za-z\d+/]{0,3}={0,2}\s*"
)
"""Bytes in base64."""
PRINTED = re.compile(
    r"([A-Z]\w*(Completion|Response|Message|Output|Result)\w*\(\w+=|content=['\"].*\b\w+_metadata=\{)", re.DOTALL
)
"""Objects of libraries as Python prints them."""

NOT_A_MESSAGE = "an item of a response that is neither a message nor a call, such as a list of tools"
BINARY = "a recorded response in binary, written as hexadecimal digits or base64"
PRINTED_OBJECT = "a response as Python prints it; record its text or its JSON"
SEPARATOR_BYTES = SEPARATOR.tobytes()
BAD_IDS = f"token ids that are not integers from 0 to {MAX_TOKEN_ID:,}"
UNTRAINED = "a message that its log excludes from training (weight 0, or part of the input)"


Delta = tuple[int, Message, bool]
"""The number of an answer among those to one request, pieces of its message, and whether they are the last."""
EVENT = re.compile("message_|content_block_|(message|content|tool-plan|tool-call|citation)-(start|delta|end)$")
"""Types of Anthropic's events and Cohere's."""
BEDROCK = ("messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop")
"""Events of Bedrock's ConverseStream."""
WHOLE = ("response.completed", "response.incomplete")
"""Types of the last event of the Responses API, which repeats all pieces; "incomplete": after the limit of tokens."""


class Found(NamedTuple):
    """An output in a record."""

    output: Output
    prompt: Part | Chat | None = None
    request: str | None = None
    """Name of the request in the log."""


def exchange(request: object, response: object, skipped: list[str], name: object = None) -> list[Found]:
    """Return the outputs of a response, with the prompt of the request. name: name of the request, if it is a string.

    skipped: gets the reason for each part that is left out.
    """
    request, response = request_of(request, skipped), body_of(response)
    fields = response if isinstance(response, dict) else {}
    name = name or fields.get("id")
    name = name if isinstance(name, str) and name else None
    if isinstance(choices := fields.get("choices"), list):
        return [Found(output, prompt, name) for output, prompt in _choices(request, fields, choices, skipped)]
    # If both are one record, its messages are those of the request.
    run: Any = response if request is response else fields.get("messages", response)
    if chats.is_chat(run) and any(chats.role_of(one) != ASSISTANT for one in run):  # Of an agent
        found = conversation(run, request, skipped, prompt_of(request)) or []
        return [one._replace(request=name) for one in found]
    outputs = outputs_of(response, skipped)
    prompt = prompt_of(request) if outputs else None
    if isinstance(prompt, str) and isinstance(fields.get("output"), list):  # The Responses API's input is a message.
        prompt = chat_of([{"role": chats.USER, "content": prompt}], request)
    return [Found(output, prompt, name) for output in outputs]


def _choices(
    request: object, answer: Message, choices: list[Any], skipped: list[str]
) -> Iterable[tuple[Output, Part | Chat | None]]:
    """Yield OpenAI's choices, each with its prompt: there may be several prompts, with equally many choices each."""
    fields = request if isinstance(request, dict) else {}
    prompts = fields.get("prompt")
    several = prompts if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else None
    columns = (ids_of(at.get(PROMPT_IDS[0])) for at in (answer, fields))
    common = next((ids for ids in columns if ids is not None), None if several else prompt_of(request))
    for position, choice in enumerate(choices):
        if not isinstance(choice, dict):
            continue
        own = ids_of(choice.get(PROMPT_IDS[0]))
        prompt = common if own is None else own
        if several and prompt is None:
            index = choice.get("index")
            number = (index if isinstance(index, int) else position) // max(1, len(choices) // len(several))
            prompt = part_of(several[number]) if 0 <= number < len(several) else None
        for output in outputs_of(choice, skipped):
            if fields.get("echo") and isinstance(output, str) and isinstance(prompt, str):
                output = output.removeprefix(prompt)
            if not isinstance(output, str) or output:
                yield output, prompt


def conversation(
    messages: object, request: object, skipped: list[str], before: Part | Chat | None = None
) -> list[Found] | None:
    """Return each message of the assistant as an output, with all messages before it as its prompt; None for no chat.

    before: may have messages before the first one, which are not outputs, also if the list begins with them.
    """
    chat = chat_of(messages, request, skipped)
    if chat is None:
        return None
    first = before.messages if isinstance(before, Chat) else []
    if first and chat.messages[: len(first)] == first:
        chat = chat._replace(messages=chat.messages[len(first) :])
    read = [*first, *chat.messages]
    tools = chat.tools or (before.tools if isinstance(before, Chat) else None)
    found = []
    for index, message in enumerate(chat.messages, len(first)):
        if message["role"] != ASSISTANT or (output := reply_to(message)) is None:
            continue
        if chats.UNTRAINED in message:
            skipped.append(UNTRAINED)
        else:
            found.append(Found(output, chat._replace(messages=read[:index], tools=tools) if index else None))
    return found


def outputs_of(value: object, skipped: list[str]) -> list[Output]:
    """Return the outputs in a response: its text, token ids, message, or those of its choices or samples."""
    if isinstance(value, str) and (HEX.fullmatch(value) or BASE64.fullmatch(value) or PRINTED.match(value)):
        skipped.append(PRINTED_OBJECT if PRINTED.match(value) else BINARY)
        return []
    if isinstance(value, str):
        return [value] if value else []
    if (ids := ids_of(value)) is not None:
        return [ids]
    if isinstance(value, list):
        if (whole := response_of(value)) is not None:
            return outputs_of(whole, skipped)
        if chats.are_parts(value):
            return outputs_of({"role": ASSISTANT, "content": value}, skipped)
        if len(value) == 2 and isinstance(value[1], str) and value[1] in ENDS:  # Why it ended
            return outputs_of(value[0], skipped)
        items = [one for one in value if not isinstance(one, dict) or "type" not in one or chats.role_of(one)]
        if len(items) < len(value) and chats.is_chat(items):
            skipped += [NOT_A_MESSAGE] * (len(value) - len(items))
            value = items
        if chats.is_chat(value):
            messages = chats.read_messages(value, skipped)
            are_samples = all(message["role"] == ASSISTANT for message in messages)
            return [output for one in (messages if are_samples else messages[-1:]) for output in _reply([one])]
        return [output for element in value for output in outputs_of(element, skipped)]
    if not isinstance(value, dict):
        return []
    if value.get("encoding") == "base64":
        skipped.append(chats.ENCODED)
        return []
    if (ids := first_ids(value, OUTPUT_IDS)) is not None:
        return [ids]
    if isinstance(message := value.get("message"), dict):  # OpenAI, Ollama, LangChain
        return _reply(chats.messages_of(message, skipped, ASSISTANT))
    results = value.get("results")  # Bedrock's Titan
    if isinstance(results, list) and any(isinstance(one, dict) and "outputText" in one for one in results):
        return outputs_of(results, skipped)
    for name in SAMPLES:
        if isinstance(inner := value.get(name), list) or (name == "output" and isinstance(inner, dict)):
            return outputs_of(inner, skipped)
    if chats.role_of(value) or value.keys() & {"content", "tool_calls", "parts"}:
        return _reply(chats.messages_of(value, skipped, ASSISTANT))
    text = next((value[name] for name in TEXTS if value.get(name)), None)
    if isinstance(text, str) and not value.keys().isdisjoint(chats.THOUGHTS_BESIDE):
        return _reply(chats.messages_of({**value, "role": ASSISTANT, "content": text}, skipped))
    return [] if text is None else outputs_of(text, skipped)


def _reply(messages: list[Message]) -> list[Output]:
    """Return the output in the last message, if it is the assistant's."""
    reply = reply_to(messages[-1]) if messages and messages[-1]["role"] == ASSISTANT else None
    return [] if reply is None else [reply]


def prompt_of(request: object, skip: str | None = None) -> Part | Chat | None:
    """Return the prompt of a request, None if it has none. skip: a field that is not read."""
    if (part := part_of(request)) is not None:
        return part
    if isinstance(request, list):
        nested = prompt_of(request[0]) if request and isinstance(request[0], list | str) and len(request) == 1 else None
        return chat_of(request) or nested
    if not isinstance(request, dict):
        return None
    if (ids := first_ids(request, PROMPT_IDS)) is not None:
        return ids
    for name in CHATS:
        turns = parsed(request[name]) if name in request and name != skip else None
        if name == "contents" and isinstance(turns, list):  # Gemini's role of a user may be left out.
            turns = [{"role": chats.USER, **one} if isinstance(one, dict) and "parts" in one else one for one in turns]
        if isinstance(chat := prompt_of(turns), Chat):
            return chats.with_request(chat, request)
    for name in PROMPTS:
        prompt = prompt_of(request_of(request[name], [])) if request.get(name) is not None and name != skip else None
        if isinstance(prompt, Chat):
            return chats.with_request(prompt, request)
        if prompt is not None:
            more = request.get("input") if name == "instruction" and isinstance(prompt, str) else None
            return f"{prompt}\n{more}" if isinstance(more, str) and more else prompt
    return None


# --- Texts and token ids


def part_of(value: object) -> Part | None:
    """Return a text or token ids; None if the value is neither, or empty."""
    return value or None if isinstance(value, str) else ids_of(value)


def first_ids(record: Mapping[str, Any], names: Iterable[str]) -> np.ndarray | None:
    """Return the token ids in the first of the fields that has some, uint32 [N]."""
    for name in names:
        if name in record and (ids := ids_of(record[name])) is not None:
            return ids
    return None


def ids_of(value: object) -> np.ndarray | None:
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


# --- Streams: events of any API, and the response that their pieces make


def deltas_of(event: object) -> list[Delta] | None:
    """Return the parts of answers in an event of a stream; None if the value is not one."""
    if not isinstance(event, dict):
        return None
    choices, kind, candidates = event.get("choices"), event.get("type"), event.get("candidates")
    if isinstance(choices, list):
        return _chunk(event, choices)
    kind = kind if isinstance(kind, str) else next((name for name in BEDROCK if isinstance(event.get(name), dict)), "")
    if kind in BEDROCK or EVENT.match(kind):
        return [(0, _event_piece(event.get(kind, event)), kind in ("message_stop", "message-end", "messageStop"))]
    if isinstance(candidates, list):  # Gemini
        return [_gemini_piece(candidate) for candidate in candidates if isinstance(candidate, dict)]
    if isinstance(event.get("done"), bool) and ("message" in event or "response" in event):  # Ollama
        fields = _object(event.get("message")) or {**event, "content": event.get("response")}
        return [(0, fields, event["done"])]
    if isinstance(event.get("stop"), bool) and isinstance(event.get("content"), str):  # llama.cpp
        return [(0, event, event["stop"])]
    return None


def _chunk(event: Message, choices: list[Any]) -> list[Delta] | None:
    """Return the deltas of OpenAI's choices. Unlike a chunk of a text, a whole one has its usage."""
    choices = [choice for choice in choices if isinstance(choice, dict)]
    if choices and "message" in choices[0]:
        return None
    is_text = event.get("object") == "text_completion" and not event.get("usage") and "prompt" not in event
    is_chunk = any("delta" in choice or (is_text and "finish_reason" in choice) for choice in choices)
    if not is_chunk and not str(event.get("object")).endswith(".chunk"):
        return None
    pieces = [choice["delta"] if isinstance(choice.get("delta"), dict) else choice for choice in choices]
    ends = [choice.get("finish_reason") is not None for choice in choices]
    return list(zip(map(_number, choices), pieces, ends, strict=True))


def _gemini_piece(candidate: Message) -> Delta:
    parts = _object(candidate.get("content")).get("parts")
    return _number(candidate), {"parts": parts}, either(candidate, "finishReason") is not None


def either(value: Mapping[str, Any], name: str) -> object:
    """Return a field of Gemini's API, which its libraries write in snake case."""
    snake = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)
    return value.get(name, value.get(snake))


def _number(answer: Message) -> int:
    return index if isinstance(index := answer.get("index"), int) else 0


def _event_piece(event: Message) -> Message:
    """Return the pieces in an event of Anthropic, Cohere or Bedrock."""
    block = _object(event.get("content_block"))
    block = block if str(block.get("type")).endswith("tool_use") else {}  # Not results of tools of the service
    delta = _object(event.get("delta") or event.get("start") or block)
    message, thought, tool = (_object(delta.get(name)) for name in ("message", "reasoningContent", "toolUse"))
    call = {"index": event.get("index", event.get("contentBlockIndex")), **_object(message.get("tool_calls"))}
    if tool or block or "partial_json" in delta:
        arguments = delta.get("partial_json", tool.get("input"))
        call["function"] = {"name": (tool or block).get("name"), "arguments": arguments}
    thoughts = thought.get("text") or message.get("tool_plan")
    return {**delta, "reasoning": thoughts, **_object(message.get("content")), "tool_calls": [call]}


def _object(value: object) -> Message:
    """Return an object; an empty one for other values."""
    return value if isinstance(value, dict) else {}


class Streamed:
    """A response whose pieces arrive one by one."""

    def __init__(self) -> None:
        self._answers: dict[int, Message] = {}
        """By its number, the pieces of an answer: lists of texts, Gemini's parts, and calls."""
        self._open: set[int] = set()
        self._whole: object = None

    def add(self, event: Mapping[str, Any]) -> bool:
        """Add the pieces of an event, and return whether it ends the response."""
        if event.get("type") in WHOLE:
            self._whole = event.get("response")
            return True
        deltas = deltas_of(event) or []
        for number, fields, is_last in deltas:
            new: Message = {"content": [], "reasoning": [], "parts": [], "calls": []}
            answer = self._answers.setdefault(number, new)
            if isinstance(content := fields.get("content"), list):  # Mistral
                for message in chats.messages_of({"content": content}, [], ASSISTANT):
                    fields = {**fields, **message}
            answer["content"].append(_piece(fields, "content", "text"))
            answer["reasoning"].append(_piece(fields, "reasoning_content", "reasoning", "thinking"))
            answer["parts"] += parts if isinstance(parts := fields.get("parts"), list) else []
            calls = fields.get("tool_calls") or [{"function": fields.get("function_call")}]
            for position, call in enumerate(calls if isinstance(calls, list) else ()):
                if isinstance(call, dict) and isinstance(call.get("function"), dict):
                    _add_call(answer["calls"], {"index": position, **call})
            (self._open.discard if is_last else self._open.add)(number)
        return bool(deltas) and not self._open

    def response(self) -> object:
        """Return what has arrived as a response with choices."""
        return self._whole or {"choices": [{"message": _message(self._answers[key])} for key in sorted(self._answers)]}


def _add_call(calls: list[Message], piece: Message) -> None:
    """Add a piece of a tool call to the last call with its index, or begin another one.

    Some services have one index for all calls, each with its own id or with its whole arguments.
    """
    index, function, known = str(piece["index"]), piece["function"], piece.get("id")
    call = next((one for one in reversed(calls) if one["index"] == index), None)
    name, arguments = _piece(function, "name"), function.get("arguments")
    # Some servers have a new id in each piece, and the name in the first.
    if call is None or isinstance(arguments, dict) or (name and known not in (None, "", call["id"])):
        calls.append(call := {"index": index, "id": known, "name": "", "arguments": []})
    call["name"] += name if name != call["name"] else ""  # Some servers repeat it.
    call["arguments"].append(_piece(function, "arguments"))


def _message(answer: Message) -> Message:
    calls = [{"name": call["name"], "arguments": "".join(call["arguments"])} for call in answer["calls"]]
    texts = {name: "".join(answer[name]) for name in ("content", "reasoning")}
    return {**texts, "parts": answer["parts"], "tool_calls": [{"function": call} for call in calls]}


def response_of(events: list[Any]) -> object:
    """Return the response whose pieces are in the events of a stream; None if the values are not its events."""
    is_whole = bool(events) and isinstance(events[-1], dict) and events[-1].get("type") in WHOLE
    if not is_whole and (not events or deltas_of(events[0]) is None):
        return None
    streamed = Streamed()
    for event in events:
        if isinstance(event, dict):
            streamed.add(event)
    return streamed.response()


def _piece(fields: Message, *names: str) -> str:
    """Return the text in the first of the fields that has one; an object is JSON."""
    value = next((fields[name] for name in names if fields.get(name)), "")
    return value if isinstance(value, str) else as_json(value) if isinstance(value, dict) else ""
