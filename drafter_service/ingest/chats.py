"""Chat messages in the formats of logs, converted to messages as in OpenAI's API, which chat templates render."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from drafter_service.client.chat_template import normalized

Message = dict[str, Any]

ASSISTANT, USER, SYSTEM, TOOL = "assistant", "user", "system", "tool"
CALL = "function_call"
"""Role of a message of ShareGPT whose text is a tool call as JSON."""


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text, such as a list of names."""
    return tuple(text.split())


ROLES = {
    **dict.fromkeys(
        words("assistant gpt chatgpt model ai bot chatbot bing bard claude gemini aimessage aimessagechunk"), ASSISTANT
    ),
    **dict.fromkeys(words("user human prompter humanmessage"), USER),
    **dict.fromkeys(words("system systemmessage"), SYSTEM),
    **dict.fromkeys(
        words("tool function observation function_response tool_response toolresult tool_result ipython toolmessage"),
        TOOL,
    ),
    **dict.fromkeys(words("function_call tool_call"), CALL),
    "developer": "developer",
}
"""Roles in OpenAI's names, by the lowercase names that logs have for them."""
ROLE_FIELDS = ("role", "from", "author", "sender", "role_name")
SPEAKERS = ("system", "human", "user", "assistant")
"""Fields of pairs of messages."""
PLAIN = (USER, ASSISTANT, SYSTEM, "developer")
RENDERED = frozenset(("tool_calls", "reasoning_content"))
"""Fields of messages that only a chat template can convert to the text that the model wrote."""
UNTRAINED = "weight"
"""Field of messages of the assistant that are not outputs."""

CALLED = ("name", "toolName", "function_name")
ARGUMENTS = ("arguments", "args", "input", "parameters")
CALLS = frozenset(
    words(
        "tool_use tool_call function_call custom_tool_call toolUse functionCall toolCall server_tool_use mcp_tool_use"
        " mcp_call"
    )
)
RESULTS = frozenset(
    words(
        "tool_result tool_call_response function_result function_call_output custom_tool_call_output toolResult"
        " functionResponse function_response"
    )
)
THOUGHTS = frozenset(
    words("thinking reasoning reasoning.text reasoning.summary reasoning_text reasoningContent thoughts")
)
"""Types of parts of a content; Gemini and Bedrock have them as the name of the part's only field."""
PARTS = frozenset(words("text output_text thinking redacted_thinking tool_use"))
"""Types of the parts of an answer of Anthropic's API and of OpenAI's."""
TEXTS = ("text", "value", "refusal", "content")
FILES = frozenset(words("inlineData inline_data fileData image image_url codeExecutionResult code_execution_result"))
"""Fields of parts that are not text of the model."""
THOUGHTS_BESIDE = words("reasoning_content reasoning thinking thinking_blocks reasoning_details thoughts reasoningText")
"""Fields with the reasoning of a message, in which some services repeat it."""
CONTENTS = ("content", "value", "parts", "blocks", "text", "message", "result", "collected_content")
CALLS_BESIDE = ("tool_calls", "function_call", "toolCalls", "toolRequests")
"""Fields with the tool calls of a message."""
UNUSUAL = frozenset(
    (
        *THOUGHTS_BESIDE,
        *CALLS_BESIDE,
        *words("tool_call_id name additional_kwargs refusal weight loss_weight loss source"),
    )
)
"""Fields of messages with more than a text."""

AROUND_JSON = "\ufeff \t\r\n"
"""Characters before and after a JSON value: a byte order mark and white space."""
DECODER = json.JSONDecoder()
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

BROKEN_CALL = "a tool call whose arguments are not JSON"
CALL_PIECE = "a piece of a tool call of Gemini whose arguments are streamed"
NAMELESS_CALL = "a tool call without the name of a function"
SERVER_CALL = "a call of a tool of the service, of which the log has no name and arguments"
ENCODED = "bytes in base64, which are not text of a model"
UNFINISHED = "a part of a message that was not finished when it was recorded"
NO_CONTENT = "a message whose content is neither text nor parts with text"


class Chat(NamedTuple):
    """The messages before an answer."""

    messages: list[Message]
    tools: list[Any] | None = None
    template_arguments: Message | None = None
    """Further variables of the chat template (`chat_template_kwargs` of a request)."""


class Reply(NamedTuple):
    """An answer with reasoning or tool calls, whose text depends on the model's chat template."""

    message: Message


def role_of(message: object) -> str | None:
    """Return the role of a message in OpenAI's names, or an unknown one as it is; None if it is not a message."""
    if not isinstance(message, dict):
        return None
    message = inner_of(message)
    if "isCreatedByUser" in message:  # LibreChat; the sender is the name of the model.
        return USER if message["isCreatedByUser"] else ASSISTANT
    role = next((message[name] for name in ROLE_FIELDS if message.get(name)), None)
    if role is None and isinstance(kind := message.get("type"), str):
        if (item := item_role(kind)) is not None:
            return item
        names = message.get("id")  # LangChain
        name = names[-1] if kind == "constructor" and isinstance(names, list) and names else kind
        has_content = message.keys() & {"content", "data", "kwargs"}
        role = name if has_content and isinstance(name, str) and name.lower() in ROLES else None
    if role is None and "models_usage" in message:  # AutoGen, which has the names of agents
        return USER if message["models_usage"] is None else ASSISTANT
    role = role.get("role") if isinstance(role, dict) else role
    return ROLES.get(role.lower(), role) if isinstance(role, str) else None


def inner_of(event: Message) -> Message:
    """Return the message that an event has in a field, with the role of the event; other values as they are.

    An answer with a message, such as one of OpenAI's choices or of Gemini's candidates, is not an event.
    """
    event = raw if isinstance(raw := event.get("raw"), dict) and "type" in raw else event
    if isinstance(event.get("content"), str):
        return event
    kind, role = event.get("type"), event.get("role")
    kind = kind if isinstance(kind, str) else ""
    if kind in ("tool_use", "tool_result") and "tool_id" in event:  # Gemini CLI
        call = {"name": event.get("tool_name"), "arguments": event.get("parameters")}
        result = {"role": TOOL, "content": event.get("output") or ""}
        return {"role": ASSISTANT, "tool_calls": [call]} if kind == "tool_use" else result
    if kind.startswith(("agent.", "user.")) and ("content" in event or kind.endswith("tool_use")):  # Managed agents
        role = TOOL if kind.endswith("tool_result") else ASSISTANT if kind.startswith("agent.") else USER
        call = {**event, "type": "tool_use"}
        return {"role": role, "content": [call] if kind.endswith("tool_use") else event["content"]}
    if kind == "ToolCallRequestEvent":  # AutoGen
        return {"role": ASSISTANT, "tool_calls": event.get("content")}
    if kind == "ToolCallExecutionEvent":
        return {"role": TOOL, "content": event.get("content")}
    if isinstance(inner := event.get("message"), dict) and "message" not in inner:
        if isinstance(inner.get("role"), str) and (kind == "message" or kind.lower() in ROLES):
            return inner
        if isinstance(role, str) and "content" in inner and "content" not in event:  # Cursor
            return {**inner, "role": role}
    if isinstance(inner := event.get("info"), dict) and isinstance(event.get("parts"), list):  # OpenCode
        return {"role": inner.get("role"), "parts": event["parts"]}
    if "author" in event and isinstance(inner := event.get("content"), dict) and isinstance(inner.get("role"), str):
        return inner  # Google's ADK
    if kind.endswith((".message", ".execution_complete")) and isinstance(inner := event.get("data"), dict):
        return {**inner, "role": kind.partition(".")[0]}  # Copilot
    return event


def item_role(kind: object) -> str | None:
    """Return the role of an item of the Responses API, except messages, by its type; None for other types."""
    is_model = isinstance(kind, str) and (kind == "reasoning" or kind.endswith("_call"))
    return ASSISTANT if is_model else TOOL if isinstance(kind, str) and kind.endswith("_call_output") else None


def is_chat(value: object) -> bool:
    """Return whether a value is a list of messages, all of known roles."""
    known = ROLES.values()
    return isinstance(value, list) and bool(value) and all(role_of(message) in known for message in value)


def are_parts(values: list[Any]) -> bool:
    """Return whether the values of a list are the parts of one answer."""
    return all(isinstance(one, dict) and "role" not in one and str(one.get("type")) in PARTS for one in values)


def messages_of(message: object, skipped: list[str], default: str | None = None) -> list[Message]:
    """Return a message as messages of OpenAI's API: several if it contains results of tools; [] if it is not one.

    skipped: gets the reason for each part that is left out. default: role of a message without one.
    """
    if not isinstance(message, dict):
        return []
    content, role = message.get("content"), message.get("role", default)
    if isinstance(content, str) and role in PLAIN and not UNUSUAL & message.keys():
        return [{"role": role, "content": content}]
    message = inner_of(message)
    role = role_of(message) or default
    if role is None:
        return []
    for inner in ("kwargs", "data"):  # LangChain
        message = message[inner] if isinstance(message.get(inner), dict) else message
    parts = _Parts(skipped)
    content = next((message[name] for name in CONTENTS if message.get(name)), None)
    if role == CALL:
        role = ASSISTANT
        content = None if parts.add_encoded_calls(content) else content
    if "role" not in message and item_role(message.get("type")):
        content = message
    else:
        present = (_texts(message[name]) for name in THOUGHTS_BESIDE if name in message)
        parts.thoughts += next(filter(None, present), [])
    parts.add(content)
    parts.add(message.get("refusal"))
    for source in (message, message.get("additional_kwargs")):
        if isinstance(source, dict) and not parts.calls:
            parts.add_encoded_calls(next((source[name] for name in CALLS_BESIDE if source.get(name)), None))
    named = {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
    if message.get("weight", message.get("loss_weight", message.get("loss"))) == 0 or message.get("source") == "input":
        named[UNTRAINED] = 0
    return parts.messages(role, named)


def read_messages(messages: list[Any], skipped: list[str]) -> list[Message]:
    """Return all messages of a list; consecutive items of the Responses API that the model wrote are one message."""
    read: list[Message] = []
    for message in messages:
        kind = message.get("type") if isinstance(message, dict) else None
        is_item = kind == "message" or item_role(kind) is not None
        for converted in messages_of(message, skipped):
            if is_item and converted["role"] == ASSISTANT and read and read[-1]["role"] == ASSISTANT:
                read[-1] = joined(read[-1], converted)
            else:
                read.append(converted)
    return read


def joined(first: Message, second: Message, between: str = "\n") -> Message:
    """Return two parts of one message of the assistant as one."""
    message = {**first, "content": between.join(filter(None, [first["content"], second["content"]]))}
    if thoughts := [part["reasoning_content"] for part in (first, second) if "reasoning_content" in part]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return message


def chat_of(messages: object, request: object = None, skipped: list[str] | None = None) -> Chat | None:
    """Return a list of messages as a chat; None if it is not one.

    request: the object that may have the system prompt, the tools and variables of the template.
    """
    messages = _turns(messages)
    if not isinstance(messages, list) or not messages or role_of(messages[0]) is None:
        return None
    if all(isinstance(one, dict) and one.get("object") == "thread.message" for one in messages):
        # The Assistants API lists the last message first.
        messages = sorted(messages, key=lambda one: one["created_at"] if isinstance(one.get("created_at"), int) else 0)
    read = read_messages(messages, [] if skipped is None else skipped)
    if len(read) < len(messages) and any(
        role_of(one) is None and not (isinstance(one, dict) and "type" in one) for one in messages
    ):
        return None
    return with_request(Chat(read), request if isinstance(request, dict) else {}) if read else None


def _turns(pairs: object) -> object:
    """Return the messages of a list of pairs such as {"human": "...", "assistant": "..."}; others as they are."""
    if not isinstance(pairs, list) or not all(isinstance(pair, dict) and "assistant" in pair for pair in pairs):
        return pairs
    return [{"role": ROLES[name], "content": pair[name]} for pair in pairs for name in SPEAKERS if pair.get(name)]


def with_request(chat: Chat, request: Mapping[str, Any]) -> Chat:
    """Return a chat with what a request has beside its messages: a system prompt, tools, variables of the template."""
    system: list[Message] = []
    if chat.messages[0]["role"] not in (SYSTEM, "developer"):
        names = ("system", "system_prompt", "systemInstruction", "system_instruction", "instructions")
        value = next((request[name] for name in names if request.get(name)), None)
        system = messages_of({"role": SYSTEM, "content": value}, []) if value else []
    arguments = request.get("chat_template_kwargs")
    arguments = arguments if isinstance(arguments, dict) else chat.template_arguments
    return Chat([*system, *chat.messages], chat.tools or _tools_of(request), arguments)


def _tools_of(request: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that a request offers, in OpenAI's format; None if there are none."""
    offered = parsed(request.get("tools") or request.get("functions"))
    tools: list[Any] = []
    for tool in offered if isinstance(offered, list) else ():
        if isinstance(tool, dict) and "function" not in tool and isinstance(tool.get("name"), str):
            schema = tool.get("parameters") or tool.get("input_schema") or {}
            tool = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
            tool = {"type": "function", "function": tool}
        tools.append(tool)
    return tools or None


def reply_to(message: Message) -> str | Reply | None:
    """Return a converted message as an output; None if it is empty."""
    return Reply(message) if len(message) > 2 and RENDERED & message.keys() else message["content"] or None


def plain_text(message: Message) -> str:
    """Return the text of a message without a template: reasoning, content and tool calls as JSON."""
    fields = normalized(message)
    calls = fields.get("tool_calls") or []
    written = [as_json({name: call["function"][name] for name in ("name", "arguments")}) for call in calls]
    return "\n\n".join(filter(None, [fields.get("reasoning_content", ""), fields["content"], *written]))


def parsed(value: object) -> object:
    """Return an object or a list that may be encoded as a JSON string, or as Python prints it; others as they are."""
    text = value.strip(AROUND_JSON) if isinstance(value, str) else ""
    if text[:1] not in ("{", "["):
        return value
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(text)
    with suppress(ValueError, RecursionError):
        read, end = decoded(text, 0)
        if end == len(text):
            return read
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        if text.startswith(("{'", "[{'")):
            return ast.literal_eval(text)
    return value


def decoded(text: str, first: int) -> tuple[object, int]:
    """Return the JSON value that begins at `first`, and its end. Raises ValueError.

    NaN is accepted, and lone surrogates are replaced.
    """
    value, end = DECODER.raw_decode(text, first)
    if SURROGATE.search(text, first, end):
        plain = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
        value = json.loads(plain.decode("utf-16-le", "replace"))
    return value, end


class _Parts:
    """The contents of a message, sorted by kind."""

    def __init__(self, skipped: list[str]) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[Message] = []
        self.results: list[Message] = []
        self._after: list[Message] = []
        """Results of the message's own calls."""
        self._skipped = skipped

    def add(self, content: object) -> None:
        """Add a content: a text, a list of parts, or an object, which is added as JSON unless it is a part."""
        if isinstance(content, str):
            self.texts += [content] if content else []
        elif isinstance(content, list):
            for part in content:
                self.add(part)
        elif isinstance(content, dict):
            self._add_object(content)
        elif content is not None:
            self._skipped.append(NO_CONTENT)

    def _add_object(self, part: Message) -> None:
        if str(part.get("state")).endswith("streaming"):  # Messages of Vercel's pages
            self._skipped.append(UNFINISHED)
            return
        if part.get("encoding") == "base64":
            self._skipped.append(ENCODED)
            return
        kind = str(part.get("type") or part.get("content_type") or "")
        if isinstance(state := part.get("toolInvocation" if "toolInvocation" in part else "state"), dict):
            self._add_step({**part, **state})
            return
        if kind == "dynamic-tool" or kind.startswith("tool-"):
            self._add_step({"toolName": kind.removeprefix("tool-"), **part})
            return
        if isinstance(call := part.get("toolCall", part.get("toolResult")), dict) and "value" in call:  # Goose
            kind, value = "toolCall" if "toolCall" in part else "toolResult", call["value"]
            part = value if kind == "toolCall" and isinstance(value, dict) else {"content": value}
        if not kind and (named := [name for name in part if name in CALLS | RESULTS | THOUGHTS]):
            kind = named[0]
            part = part[kind] if isinstance(part[kind], dict) else part
        if kind in CALLS:
            if not isinstance(part.get("value"), str) or not self.add_encoded_calls(part["value"]):
                self.add_call(part)
        elif kind in RESULTS:
            result = next((part[name] for name in ("content", "response", "output") if part.get(name)), "")
            texts = _texts(result) or [as_json(result)]
            known = part.get("tool_use_id") or part.get("call_id") or part.get("toolUseId")
            self.results.append({"role": TOOL, "content": "\n".join(texts)})
            self.results[-1] |= {"tool_call_id": known} if isinstance(known, str) else {}
        elif kind.endswith(("_call", "Call", "Request", "tool_request")):
            self._skipped.append(SERVER_CALL)
        elif kind in THOUGHTS or part.get("thought") is True:
            self.thoughts += _texts(part)
        elif isinstance(part.get("parts"), list):
            self.add(part["parts"])
        elif not kind or "text" in kind or kind in ("refusal", "code"):
            nested = part["text"] if isinstance(part.get("text"), dict) else part  # Assistants API
            text = next((nested[name] for name in TEXTS if isinstance(nested.get(name), str)), None)
            if text is None and not kind and part and not FILES & part.keys() and "role" not in part:
                text = as_json(part)
            self.texts += [text] if text else []

    def _add_step(self, call: Message) -> None:
        """Add a call of OpenCode or of Vercel's pages, with its result after the message."""
        if call.get("status") == "pending":
            self._skipped.append(UNFINISHED)
            return
        name, known = call.get("toolName", call.get("tool")), call.get("toolCallId", call.get("callID"))
        self.add_call({"name": name, "arguments": call.get("input", call.get("args")), "id": known})
        result = next((call[key] for key in ("output", "result", "error", "errorText") if key in call), None)
        if result is not None:
            content = result if isinstance(result, str) else as_json(result)
            self._after.append({"role": TOOL, "content": content, "tool_call_id": str(known)})

    def add_call(self, call: object) -> None:
        """Add a tool call in the format of any API."""
        function = call.get("function") or call.get("custom") or call if isinstance(call, dict) else None
        if not isinstance(call, dict) or not function:
            return
        fields = function if isinstance(function, dict) else call
        name = function if isinstance(function, str) else next((fields[key] for key in CALLED if fields.get(key)), None)
        arguments = next((fields[key] for key in ARGUMENTS if fields.get(key) is not None), "{}")
        if not {"partialArgs", "willContinue", "partial_args", "will_continue"}.isdisjoint(fields):
            self._skipped.append(CALL_PIECE)
        elif not isinstance(name, str) or not name:
            self._skipped.append(NAMELESS_CALL)
        elif _is_json(arguments) or "input" in fields:
            # The input of a custom tool is a text.
            arguments = arguments if _is_json(arguments) else {"input": arguments}
            known = call.get("id") or call.get("call_id")
            identified = {"id": known} if isinstance(known, str) else {}
            self.calls.append({**identified, "type": "function", "function": {"name": name, "arguments": arguments}})
        else:
            self._skipped.append(BROKEN_CALL)

    def add_encoded_calls(self, calls: object) -> bool:
        """Add tool calls that may be JSON; return whether there are any."""
        calls = parsed(calls)
        for call in calls if isinstance(calls, list) else [calls]:
            self.add_call(call)
        return bool(self.calls)

    def messages(self, role: str, named: Message) -> list[Message]:
        """Return the contents as messages: results of tools first, except those of calls in the same message."""
        if self.results and not (self.texts or self.thoughts or self.calls):
            return self.results
        # Parts of an answer are pieces of one text, those of a prompt are separate.
        content = ("" if role == ASSISTANT else "\n").join(self.texts)
        message: Message = {"role": role, "content": content, **named}
        message |= {"reasoning_content": "\n".join(self.thoughts)} if self.thoughts else {}
        message |= {"tool_calls": self.calls} if self.calls else {}
        return [*self.results, message, *self._after]


def _texts(content: object) -> list[str]:
    """Return the texts in a value: a string, or parts with texts, summaries or thoughts."""
    if isinstance(content, str):
        return [content] if content else []
    if isinstance(content, list):
        return [text for part in content for text in _texts(part)]
    names = words("thinking reasoning text value content summary output reasoningText thoughts description")
    present = (_texts(content[name]) for name in names if name in content) if isinstance(content, dict) else ()
    return next(filter(None, present), [])


def _is_json(value: object) -> bool:
    """Return whether a value is JSON, decoded or not."""
    try:
        json.loads(value or "{}") if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return False
    return True


def as_json(value: object) -> str:
    """Return a value as JSON, in the spacing that models use."""
    return json.dumps(value, ensure_ascii=False, default=str)
