"""Finding outputs and prompts in records of every format."""

# ruff: noqa: E501  # Each case is a line.

import json
import re
from base64 import b64encode
from contextlib import suppress
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.ingest.answers import BAD_IDS, BINARY, NOT_A_MESSAGE, PRINTED_OBJECT, UNTRAINED
from drafter_service.ingest.bodies import BROKEN_BODY, BROKEN_STREAM
from drafter_service.ingest.chats import (
    BROKEN_CALL,
    CALL_PIECE,
    ENCODED,
    NAMELESS_CALL,
    NO_CONTENT,
    SERVER_CALL,
    UNFINISHED,
    Chat,
    Reply,
    plain_text,
)
from drafter_service.ingest.documents import RecordError
from drafter_service.ingest.formats import (
    ANY_FIELD,
    FAILED_REQUEST,
    FIELDS,
    FORMATS,
    HINT,
    NO_FIELD,
    NO_FORMAT,
    NO_OUTPUT,
    NOT_A_RECORD,
    OF_A_TEST,
    REPEATED,
    read_records,
)
from drafter_service.ingest.readers import NO_RESPONSE, NOT_A_MODEL, REJECTED, SCORES, SHORTER
from drafter_service.ingest.sessions import (
    NO_ANSWER,
    UNNAMED,
    Record,
    Unread,
    markdown_chat,
)
from tests.strategies import examples

ROOT = Path(__file__).parents[3]

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
CHOICES = [{"index": 0, "message": ANSWER}]
PARTS = {"role": "assistant", "parts": [{"type": "text", "content": "Because."}], "finish_reason": "stop"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
CALLED = '{"name": "look", "arguments": {"at": "it"}}'
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "seen"}
BROKEN = {"role": "assistant", "content": "Well.", "tool_calls": [{"function": {"name": "f", "arguments": '{"a'}}]}
PIECES = [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "I "}, {"type": "text", "text": "look."},
          {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "it"}}]  # fmt: skip
WRITTEN = f"Hm.\n\nI look.\n\n{CALLED}"
"""What the content of a message of Anthropic's API is read as."""
CHUNK = {"id": "c", "object": "chat.completion.chunk"}
VERCEL = [
    {"type": "tool-look", "toolCallId": "1", "state": "output-available", "input": {"at": "it"}, "output": {"x": 1}},
    {"type": "dynamic-tool", "toolName": "look", "toolCallId": "1", "input": {"at": "it"}, "output": {"x": 1}},
    {"type": "tool-invocation", "toolInvocation": {
        "state": "result", "toolCallId": "1", "toolName": "look", "args": {"at": "it"}, "result": {"x": 1}}},
]  # fmt: skip
THREADED = {"object": "thread.message", "thread_id": "t", "status": "completed", "role": "assistant",
            "content": [{"type": "text", "text": {"value": "Because.", "annotations": []}}]}  # fmt: skip


def reads(*values, fields=()):
    """Return the contents of values, one record each."""
    return list(read_records([Record(value, f"a:{number}") for number, value in enumerate(values, 1)], fields))


def outputs(*values, fields=()):
    """Return (prompt, output) of each output as plain values."""
    return [(plain(one.prompt), plain(one.output)) for read in reads(*values, fields=fields) for one in read.outputs]


def skipped(*values, fields=()):
    """Return the reasons for what is left out."""
    return [reason for read in reads(*values, fields=fields) for reason in read.skipped]


def plain(part):
    if isinstance(part, np.ndarray):
        assert part.dtype == np.uint32
        return part.tolist()
    if isinstance(part, Chat):
        return [plain_text(message) for message in part.messages]
    return plain_text(part.message) if isinstance(part, Reply) else part


def opencode(role, *parts):
    return {"info": {"role": role, "id": "m", "sessionID": "s"}, "parts": [{"type": "step-start"}, *parts]}


OPENCODE = [
    opencode("user", {"type": "text", "text": "Why?"}),
    opencode("assistant", {"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "I look."},
             {"type": "tool", "tool": "look", "callID": "1",
              "state": {"status": "completed", "input": {"at": "it"}, "output": "seen"}}),
    opencode("assistant", {"type": "text", "text": "Because."}),
]  # fmt: skip
STEPS = [(["Why?"], f"Hm.\n\nI look.\n\n{CALLED}"), (["Why?", f"Hm.\n\nI look.\n\n{CALLED}", "seen"], "Because.")]


def deltas(*pieces, **fields):
    """Return the choices of chunks, the last one with the end."""
    ends = [None] * (len(pieces) - 1) + ["stop"]
    return [CHUNK | {"choices": [{"index": 0, "delta": piece, "finish_reason": end}]} | fields
            for piece, end in zip(pieces, ends, strict=True)]  # fmt: skip


def streamed(text, *end, **fields):
    """Return events of Anthropic's API, which have no id."""
    piece = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    return [
        event | fields for event in ({"type": "message_start", "message": {}}, piece, *({"type": one} for one in end))
    ]


def gemini(text, **fields):
    """Return a chunk of Gemini's first versions: each has a `finishReason`."""
    return {"candidates": [{"content": {"role": "model", "parts": [{"text": text}]}, "finishReason": "STOP"}]} | fields


def claude(role, content, **fields):
    message = {"role": role, "content": content} | ({"id": fields.pop("id")} if "id" in fields else {})
    return {"type": role, "sessionId": "s", "message": message, "uuid": f"u-{content}"[:12]} | fields


def codex(**payload):
    return {"timestamp": "2026-01-01T00:00:00Z", "type": "response_item", "payload": payload}


LOOK, AT_IT = {"name": "look", "arguments": '{"at": "it"}'}, ({"arguments": '{"at": '}, {"arguments": '"it"}'})
CALLS_IN_PIECES = [
    [({"index": 0, "id": "1"}, LOOK), ({"index": 0, "id": "2"}, LOOK)],
    [({"id": "1"}, LOOK), ({"id": "2"}, LOOK)],
    [({"index": 0}, LOOK | {"arguments": {"at": "it"}})] * 2,
    [
        ({"index": 0, "id": f"{number}{at}"}, piece)
        for number in "ab"
        for at, piece in enumerate(({"name": "look"}, *AT_IT))
    ],
]
"""Pieces of two calls that have the same index."""
ALONE, ANSWERED = [(None, "Because.")], [(["Why?"], "Because.")]
LOOKED = [(["Why?"], CALLED), (["Why?", CALLED, "seen"], "Because.")]
"""What most cases are read as: an answer without its prompt, with it, and after a tool call."""
EVENTS = "".join(f"data: {json.dumps(one)}\n\n" for one in deltas({"content": "Be"}, {"content": "cause."}))
RESPONSE = json.dumps({"id": "c", "object": "chat.completion", "choices": [{"logprobs": None, "message": ANSWER}]})
BODIES = [
    f" {RESPONSE}\n",
    f"\ufeff{RESPONSE}",
    RESPONSE.replace("null", "NaN"),
    RESPONSE.replace('"c"', '"\\ud83d"'),
    str(json.loads(RESPONSE)),
    json.dumps({"model": "m", "message": ANSWER, "done": True}),
    json.dumps({"output": {"message": ANSWER}, "usage": {}}),
    json.dumps({"status_code": 200, "body": json.loads(RESPONSE)}),
    json.dumps({"model": "m", "choices": [{"text": "Because."}]}),
    *(
        before + EVENTS
        for before in ("", "\n\n", "\ufeff", ": PROCESSING {}\n\n", "id: 1\n", ":\n\nevent: x\nretry: 3\n")
    ),
]
"""Texts that are a response with `ANSWER`."""
REQUESTS = [
    json.dumps({"contents": [{"parts": [{"text": "Why?"}], "role": "user"}]}),
    f" {json.dumps({'messages': [USER]})}",
]
WRITTEN_JSON = [
    '{"text": "JSON of a model"}',
    '{"question": "Where?", "choices": ["Paris", "Rome"], "answer": "Paris"}',
    '{"question": "Where?", "choices": [{"id": "A", "text": "Paris"}]}',
    '{"question": "Where?", "choices": [{"id": "A", "text": "Pa',
    '{"object": "chair", "answer": "It is brown."}',
    '{"role": "engineer", "text": "writes code"}',
    '{"subject": "Hello", "body": "Dear reader", "text": "x"}',
    '{"candidates": [{"name": "Ann", "content": "x"}]}',
    '{"error": {"message": "x"}, "line": 3}',
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    "{'a': 1}",
    "data: {name} is a placeholder",
]
"""Outputs that resemble bodies of an API."""
CASES = {
    "OpenAI, streamed chunks": [
        (deltas({"role": "assistant", "content": ""}, {"content": "Be"}, {"content": "cause."}), ALONE),
        (deltas({"reasoning_content": "Hm."}, {"content": "So."}, {}), [(None, "Hm.\n\nSo.")]),
        (deltas({"tool_calls": [{"index": 0, "id": "1", "function": {"name": "look", "arguments": ""}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": '}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": '"it"}'}}]}), [(None, CALLED)]),
        *((deltas(*({"tool_calls": [{**fields, "function": function}]} for fields, function in calls), {}), [(None, f"{CALLED}\n\n{CALLED}")])
          for calls in CALLS_IN_PIECES),
        (deltas({"tool_calls": [{"index": 0, "id": "1", "function": {"name": "look", "arguments": '{"at": '}}]},
                {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "look", "arguments": '"it"}'}}]}, {}), [(None, CALLED)]),
        (deltas({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "H"}]}]},
                {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "m."}]}]},
                {"content": [{"type": "text", "text": "S"}]}, {"content": "o."}), [(None, "Hm.\n\nSo.")]),
        ([{"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": end}]}
          for text, end in (("Be", None), ("cause.", "stop"))], ALONE),
        ([CHUNK | {"choices": [{"index": index, "delta": {"content": text}}]}
          for index, text in ((0, "a"), (1, "b"), (0, "c"), (1, "d"))], [(None, "ac"), (None, "bd")]),
        ([one for two in zip(deltas({"content": "a"}, {"content": "b"}), deltas({"content": "c"}, {"content": "d"}, id="d"),
                             strict=True) for one in two], [(None, "ab"), (None, "cd")]),
    ],
    "streamed events of other APIs": [
        ([*streamed("The"), *streamed("Because.", "message_stop")], [(None, "The"), *ALONE]),
        ([event for pair in zip(streamed("Because.", "message_stop", request_id="a"), streamed("So.", "message_stop", request_id="b"), strict=True)
          for event in pair], [*ALONE, (None, "So.")]),
        ([{"messageStart": {"role": "assistant"}}, {"contentBlockDelta": {"delta": {"text": "The"}}}, {"messageStart": {"role": "assistant"}},
          {"contentBlockDelta": {"delta": {"text": "Because."}}}, {"messageStop": {}}], [(None, "The"), *ALONE]),
        ([{"type": "message_start", "message": {"id": "m", "content": []}},
          {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
          {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
          {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "So."}},
          {"type": "content_block_start", "index": 2, "content_block": {"type": "server_tool_use", "name": "look", "input": {}}},
          {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"at": '}},
          {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '"it"}'}},
          {"type": "message_stop"}], [(None, f"Hm.\n\nSo.\n\n{CALLED}")]),
        ([{"type": "content_block_start", "index": 0, "content_block": {"type": "web_fetch_tool_result", "content": {"text": "seen"}}},
          {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "So."}}, {"type": "message_stop"}],
         [(None, "So.")]),
        ([{"id": "m", "type": "message-start", "delta": {"message": {"role": "assistant", "content": [], "tool_plan": ""}}},
          {"type": "content-start", "index": 0, "delta": {"message": {"content": {"type": "thinking", "thinking": "Hm."}}}},
          {"type": "content-delta", "index": 1, "delta": {"message": {"content": {"text": "So."}}}},
          {"type": "tool-call-start", "index": 0, "delta": {"message": {"tool_calls": {"function": {"name": "look", "arguments": '{"at": '}}}}},
          {"type": "tool-call-delta", "index": 0, "delta": {"message": {"tool_calls": {"function": {"arguments": '"it"}'}}}}},
          {"type": "message-end", "delta": {"finish_reason": "COMPLETE"}}], [(None, f"Hm.\n\nSo.\n\n{CALLED}")]),
        ([{"messageStart": {"role": "assistant"}},
          {"contentBlockDelta": {"contentBlockIndex": 0, "delta": {"reasoningContent": {"text": "Hm."}}}},
          {"contentBlockDelta": {"contentBlockIndex": 1, "delta": {"text": "So."}}},
          {"contentBlockStart": {"contentBlockIndex": 2, "start": {"toolUse": {"toolUseId": "1", "name": "look"}}}},
          {"contentBlockDelta": {"contentBlockIndex": 2, "delta": {"toolUse": {"input": '{"at": "it"}'}}}},
          {"messageStop": {"stopReason": "tool_use"}}], [(None, f"Hm.\n\nSo.\n\n{CALLED}")]),
        ([{"type": "response.output_text.delta", "delta": "Be"},
          {"type": "response.incomplete", "response": {"output": [ANSWER | {"type": "message"}]}}], ALONE),
        ([{"type": "response.output_text.delta", "delta": "Be"},
          {"type": "response.completed", "response": {"id": "r", "output": [ANSWER | {"type": "message"}]}}], ALONE),
    ],
    "Ollama": [
        ([{"model": "m", "message": {"content": "Be"}, "done": False}, {"model": "m", "message": {"content": "cause."}, "done": True}],
         ALONE),
        ([{"model": "m", "prompt": "Why?", "response": "Because.", "done": True}], [("Why?", "Because.")]),
        ([{"model": "m", "message": {"content": "So.", "thinking": "Hm."}, "done": True}], [(None, "Hm.\n\nSo.")]),
        ([{"model": "m", "message": {"content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "it"}}}]},
           "done": done} for done in (False, True)], [(None, f"{CALLED}\n\n{CALLED}")]),
    ],
    "llama.cpp": [
        ([{"content": "Because.", "prompt": "Why?", "stop": True, "tokens": []}], [("Why?", "Because.")]),
        ([{"content": "Be", "stop": False, "tokens": [1]}, {"content": "cause.", "stop": True, "tokens": [2]}], ALONE),
    ],
    "OpenHands, events": [
        ([{"id": 0, "source": "user", "action": "message", "args": {"content": "Why?"}},
          {"id": 1, "source": "agent", "action": "run", "args": {"command": "ls", "thought": "I look."},
           "tool_call_metadata": {"model_response": {"id": "r", "choices": [{"message": CALLING}]}}},
          {"id": 2, "source": "agent", "observation": "run", "content": "seen", "extras": {}},
          {"id": 3, "source": "agent", "action": "finish", "args": {"thought": "Because."}}], LOOKED),
    ],
    "messages, one per record": [
        *(([{name: number, **message} for message in (USER, ANSWER) for number in (1, 2)], [*ANSWERED, *ANSWERED])
          for name in ("session_id", "conversation_id", "conversationId", "chat_id", "thread_id", "trace_id")),
        ([{"session_id": 1, "trace_id": number, **message} for number, message in enumerate((USER, ANSWER))], ANSWERED),
        (OPENCODE, STEPS),
        ([{"type": "init", "model": "m"}, {"type": "message", "role": "user", "content": "Why?"},
          {"type": "message", "role": "assistant", "content": "Let me ", "delta": True}, {"type": "message", "role": "assistant", "content": "look.", "delta": True},
          {"type": "tool_use", "tool_name": "look", "tool_id": "1", "parameters": {"at": "it"}},
          {"type": "tool_result", "tool_id": "1", "output": "seen"}, {"type": "message", "role": "assistant", "content": "Because.", "delta": True}],
         [(["Why?"], "Let me look.\n\n" + CALLED), (["Why?", "Let me look.\n\n" + CALLED, "seen"], "Because.")]),
        ([{"type": "user.message", "content": [{"type": "text", "text": "Why?"}], "processed_at": "t"},
          {"type": "agent.message", "content": [{"type": "text", "text": "Let me look."}], "processed_at": "t"},
          {"type": "agent.tool_use", "name": "look", "input": {"at": "it"}, "processed_at": "t"},
          {"role": "agent", "content": "seen", "raw": {"type": "agent.tool_result", "content": [{"type": "text", "text": "seen"}], "processed_at": "t"}},
          {"role": "agent", "content": "Because.", "raw": {"type": "agent.message", "content": [{"type": "text", "text": "Because."}], "processed_at": "t"}}],
         [(["Why?"], "Let me look.\n\n" + CALLED), (["Why?", "Let me look.\n\n" + CALLED, "seen"], "Because.")]),
        ([{"role": "user", "content": "Why?", "raw": [[]]}, {"role": "assistant", "content": "Because.", "raw": "x"}], ANSWERED),
        ([{"type": "TextMessage", "source": "user", "models_usage": None, "content": "Why?"},
          {"type": "ToolCallRequestEvent", "source": "helper", "models_usage": {}, "content": [{"id": "1", "name": "look", "arguments": '{"at": "it"}'}]},
          {"type": "ToolCallExecutionEvent", "source": "helper", "models_usage": None, "content": [{"call_id": "1", "content": "seen"}]},
          {"type": "TextMessage", "source": "helper", "models_usage": {}, "content": "Because."}], LOOKED),
        ([{"type": "summary", "summary": "s", "leafUuid": "l"}, claude("user", "Why?"),
          claude("assistant", [{"type": "thinking", "thinking": "Hm."}], id="m1"),
          claude("assistant", [{"type": "text", "text": "I look."}], id="m1"),
          claude("assistant", [{"type": "tool_use", "id": "1", "name": "look", "input": {"at": "it"}}], id="m1"),
          claude("user", [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "seen"}]}]),
          claude("assistant", [{"type": "text", "text": "So."}], id="m2"),
          claude("assistant", [{"type": "text", "text": "API Error"}], isApiErrorMessage=True)],
         [(["Why?"], f"Hm.\n\nI look.\n\n{CALLED}"), (["Why?", f"Hm.\n\nI look.\n\n{CALLED}", "seen"], "So.")]),
        ([claude("user", "Why?"), claude("user", "Task", isSidechain=True), claude("assistant", "Done.", isSidechain=True),
          claude("assistant", "Because.")], [(["Why?"], "Because."), (["Task"], "Done.")]),
        ([claude("user", "Why?"), claude("assistant", "So."), claude("assistant", "I", requestId="r"), claude("assistant", "look.", requestId="r")],
         [(["Why?"], "So."), (["Why?", "So."], "I\nlook.")]),
        ([{"timestamp": "t", "type": "session_meta", "payload": {"id": "s", "instructions": "Be short."}},
          codex(type="message", role="user", content=[{"type": "input_text", "text": "Why?"}]),
          codex(type="reasoning", summary=[{"type": "summary_text", "text": "Hm."}], encrypted_content="x"),
          codex(type="function_call", name="look", arguments='{"at": "it"}', call_id="1"),
          {"timestamp": "t", "type": "event_msg", "payload": {"type": "agent_reasoning", "text": "Hm."}},
          codex(type="function_call_output", call_id="1", output='{"output": "seen"}'),
          codex(type="message", role="assistant", content=[{"type": "output_text", "text": "So."}]),
          codex(type="custom_tool_call", name="apply_patch", input="*** Begin", call_id="2")],
         [(["Be short.", "Why?"], f"Hm.\n\n{CALLED}"),
          (["Be short.", "Why?", f"Hm.\n\n{CALLED}", '{"output": "seen"}'],
           'So.\n\n{"name": "apply_patch", "arguments": {"input": "*** Begin"}}')]),
        ([{"id": "s", "timestamp": "t", "record_type": "state"},
          {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
          {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Because."}]}], ANSWERED),
        ([{"role": "system", "content": "Be short."}, USER, ANSWER, {"role": "system", "content": "New"}, USER, ANSWER],
         [(["Be short.", "Why?"], "Because."), (["New", "Why?"], "Because.")]),
        ([{"type": "message", "role": role, "text": text} for role, text in (("user", "Why?"), ("assistant", "Because."))],
         ANSWERED),
        ([{"type": "message", "id": "1", "message": {"role": "user", "content": [{"type": "text", "text": "Why?"}]}},
          {"type": "message", "id": "2", "message": {"role": "assistant", "content": [
              {"type": "thinking", "thinking": "Hm."}, {"type": "toolCall", "id": "1", "name": "look", "arguments": {"at": "it"}}]}},
          {"type": "message", "id": "3", "message": {"role": "toolResult", "toolCallId": "1", "content": "seen"}},
          {"type": "message", "id": "4", "message": {"role": "assistant", "content": [{"type": "text", "text": "So."}]}}],
         [(["Why?"], f"Hm.\n\n{CALLED}"), (["Why?", f"Hm.\n\n{CALLED}", "seen"], "So.")]),
        ([{"role": "user", "message": {"content": [{"type": "text", "text": "Why?"}]}},
          {"role": "assistant", "message": {"content": [{"type": "text", "text": "So."}]}}], [(["Why?"], "So.")]),
        ([{"type": "session.start", "data": {"result": {"content": "x"}}}, {"type": "user.message", "data": {"content": "Why?"}},
          {"type": "assistant.message", "data": {"content": "", "toolRequests": [{"name": "look", "arguments": '{"at": "it"}'}]}},
          {"type": "tool.execution_complete", "data": {"result": {"content": "seen"}}},
          {"type": "assistant.message", "data": {"content": "So."}}],
         [(["Why?"], CALLED), (["Why?", CALLED, "seen"], "So.")]),
        ([{"id": "1", "type": "user", "content": [{"text": "Why?"}]},
          {"id": "2", "type": "gemini", "content": "", "thoughts": [{"subject": "s", "description": "Hm."}],
           "toolCalls": [{"name": "look", "args": {"at": "it"}, "result": [{"functionResponse": {"response": {"output": "seen"}}}]}]}],
         [(["Why?"], f"Hm.\n\n{CALLED}")]),
    ],
    "OpenAI chat and completions": [
        ([{"question_id": 1, "model_id": "m", "choices": [{"index": 0, "turns": ["one", "two"]}]}],
         [(None, "one"), (None, "two")]),
        ([{"prompt": "p", "choices": [{"text": "t"}, {"text": "u"}]}], [("p", "t"), ("p", "u")]),
        ([{"prompt": ["p", "q"], "choices": [{"text": x, "index": i} for i, x in enumerate("tuvw")]}],
         [("p", "t"), ("p", "u"), ("q", "v"), ("q", "w")]),
        ([{"prompt": [5, 6], "choices": [{"text": "t"}]}], [([5, 6], "t")]),
        ([{"prompt": "p", "echo": True, "choices": [{"text": "p"}, {"text": "pq"}]}], [("p", "q")]),
        ([{"prompt": [[5, 6]], "choices": [{"text": "t"}]}], [([5, 6], "t")]),
        ([{"prompt": "p", "choices": [{"text": "t", "token_ids": [1, 2], "prompt_token_ids": [3]}]}], [([3], [1, 2])]),
        ([{"prompt_token_ids": [3], "choices": [{"message": ANSWER, "token_ids": [1, 2]}]}], [([3], [1, 2])]),
        ([{"messages": [USER | {"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}], "choices": CHOICES}],
         [(["a"], "Because.")]),
        ([{"choices": [{"message": {"content": None, "function_call": {"name": "look", "arguments": '{"at": "it"}'}}}]}],
         [(None, CALLED)]),
        ([{"choices": [{"message": {"content": "So.", "reasoning": "Hm.", "reasoning_details": [{"text": "Hm."}]}}]}],
         [(None, "Hm.\n\nSo.")]),
        ([{"choices": [{"message": {"content": "So.", "reasoning_details": [
            {"type": "reasoning.summary", "summary": "Hm."}, {"type": "reasoning.encrypted", "data": "x"}]}}]}],
         [(None, "Hm.\n\nSo.")]),
        ([{"choices": [{"message": {"content": None, "refusal": "No."}}]}], [(None, "No.")]),
    ],
    "OpenAI Responses API": [
        ([{"id": "r", "input": "Why?", "instructions": "Be short.", "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, {"type": "mcp_list_tools", "tools": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
            {"type": "function_call", "name": "look", "call_id": "1", "arguments": '{"at": "it"}'}]}],
         [(["Be short.", "Why?"], f"Hm.\n\nSo.\n\n{CALLED}")]),
        ([{"output": [{"type": "mcp_call", "name": "look", "arguments": '{"at": "it"}', "output": "seen"},
                      {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}]}],
         [(None, f"So.\n\n{CALLED}")]),
        ([{"messages": [USER], "output": PIECES}], [(["Why?"], WRITTEN)]),
        ([{"input": [USER, {"type": "function_call", "name": "look", "call_id": "1", "arguments": '{"at": "it"}'},
                     {"type": "function_call_output", "call_id": "1", "output": "seen"}],
           "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}]}],
         [(["Why?", CALLED, "seen"], "So.")]),
    ],
    "Anthropic messages": [
        ([{"id": "m", "type": "message", "role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "So."}, {"type": "mcp_tool_use", "id": "1", "name": "look", "input": {"at": "it"}}]}],
         [(None, f"Hm.\n\nSo.\n\n{CALLED}")]),
    ],
    "Cohere": [
        ([{"id": "m", "message": {"role": "assistant", "content": [{"type": "text", "text": "So."}]}, "finish_reason": "COMPLETE"}],
         [(None, "So.")]),
    ],
    "Gemini": [
        ([{"contents": [{"role": "user", "parts": [{"text": "Why?"}]},
                        {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"at": "it"}}}]},
                        {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"content": "seen"}}}]}],
           "systemInstruction": {"parts": [{"text": "Be short."}]},
           "candidates": [{"content": {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"text": "So."}]}}]}],
         [(["Be short.", "Why?", CALLED, "seen"], "Hm.\n\nSo.")]),
        ([{"candidates": [{"content": {"role": "model", "parts": [
            {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "seen"}}, {"text": "So."}]}}]}], [(None, "So.")]),
        ([{"responseId": response, "candidates": [{"content": {"role": "model", **parts}} | end]} for response, parts, end in (
            ("a", {"parts": [{"text": "Hm.", "thought": True}]}, {}), ("b", {"parts": [{"text": "B"}]}, {}),
            ("a", {"parts": [{"text": "S"}]}, {}), ("a", {"parts": [{"text": "o."}]}, {"finishReason": "STOP"}),
            ("b", {}, {"finishReason": "STOP"}), ("c", {}, {"finishReason": "STOP"}))],
         [(None, "Hm.\n\nSo."), (None, "B")]),
        ([gemini("So.", contents=[{"role": "user", "parts": [{"text": text}]}]) for text in "ab"], [(["a"], "So."), (["b"], "So.")]),
        ([{"candidates": [{"output": "Because."}]}] * 2, ALONE * 2),
    ],
    "OpenTelemetry and OpenInference, span": [
        ([{"gen_ai.operation.name": "chat", "gen_ai.prompt": [USER], "gen_ai.completion": [ANSWER]}], ANSWERED),
        ([{"gen_ai.input.messages": json.dumps([USER]), "gen_ai.output.messages": json.dumps([PARTS])}], ANSWERED),
        ([{"span_kind": "LLM", "attributes": {
            "llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": "Why?",
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.contents.0.message_content.type": "text",
            "llm.output_messages.0.message.contents.0.message_content.text": "So.",
            "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "look",
            "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"at": "it"}',
            "output.value": "So."}}], [(["Why?"], f"So.\n\n{CALLED}")]),
        ([{"output": '{"text": "So."}', "gen_ai.operation.name": "chat",
           "gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "text", "content": "Why?"}]}]',
           "gen_ai.output.messages": '[{"role": "assistant", "parts": [{"type": "text", "content": "So."}]}]'}], [(["Why?"], "So.")]),
        ([{"attributes": {"ai.operationId": "ai.generateText.doGenerate", "ai.prompt.messages": json.dumps([USER]),
                          "ai.response.text": "So.", "ai.response.toolCalls": '[{"toolName": "look", "input": {"at": "it"}}]'}}],
         [(["Why?"], f"So.\n\n{CALLED}")]),
        ([{"gen_ai.input.messages": json.dumps([USER]), "gen_ai.output.messages": json.dumps([PARTS, PARTS])}], ANSWERED * 2),
        ([{"attributes": {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "a",
                          "gen_ai.completion.1.role": "assistant", "gen_ai.completion.1.content": "b"}}], [(None, "a"), (None, "b")]),
        ([{"attributes": {"llm.request.type": "chat", "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "Why?",
                          "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "Because."}}], ANSWERED),
    ],
    "ChatGPT, export": [
        ([{"title": "t", "current_node": "c", "mapping": {
            "c": {"parent": "b", "message": {"author": {"role": "assistant"}, "content": {"content_type": "text", "parts": ["Because."]}}},
            "a": {"parent": "r", "message": {"author": {"role": "user"}, "content": {"content_type": "text", "parts": ["Why?"]}}},
            "b": {"parent": "a", "message": {"author": {"role": "assistant"}, "content": {
                "content_type": "thoughts", "thoughts": [{"summary": "s", "content": "Hm."}]}}},
            "r": {"parent": None, "message": None},
            "x": {"parent": "a", "message": {"author": {"role": "assistant"}, "content": {"content_type": "text", "parts": ["Left."]}}}}}],
         [(["Why?"], "Hm."), (["Why?", "Hm."], "Because.")]),
    ],
    "VS Code, Copilot Chat": [
        ([{"responderUsername": "GitHub Copilot", "requests": [
            {"message": {"text": "Why?"}, "response": [{"kind": "progressTaskSerialized", "value": "Summarized"}, {"value": "Because."}],
             "result": {"metadata": {"toolCallRounds": [
                 {"response": "", "toolCalls": [{"id": "1", "name": "look", "arguments": '{"at": "it"}'}]}, {"response": "Because."}],
                 "toolCallResults": {"1": "seen"}}}},
            {"message": {"text": "And?"}, "response": [{"value": "So"}, {"kind": "undoStop"}, {"value": "."}]}]}],
         [(["Why?"], CALLED), (["Why?", CALLED, '"seen"'], "Because."), (["Why?", CALLED, '"seen"', "Because.", "And?"], "So.")]),
    ],
    "Google AI Studio": [
        ([{"chunkedPrompt": {"chunks": [
            {"role": "user", "text": "Why?"}, {"role": "model", "text": "Hm.", "isThought": True},
            {"role": "model", "text": "Because."}]}, "runSettings": {"model": "m"}}], [(["Why?"], "Hm.\n\nBecause.")]),
    ],
    "prompt and samples": [
        ([{"prompt": "Why?", "samples": ["a", "b"]}], [("Why?", "a"), ("Why?", "b")]),
        ([{"model": "m", "samples": [{"id": "1", "output": "a", "passed": True}]}], [(None, "a")]),
    ],
    "Inspect, sample": [
        ([{"id": 1, "epoch": 1, "input": "Why?", "target": "gold", "output": {"choices": CHOICES},
           "messages": [USER | {"source": "input"}, ANSWER | {"source": "input"}, USER, ANSWER | {"source": "generate"}]}],
         [(["Why?", "Because.", "Why?"], "Because.")]),
    ],
    "BFCL": [
        ([{"id": "1", "result": "[look(at='it')]", "latency": 1.5}], [(None, "[look(at='it')]")]),
        ([{"idx": 1, "result": [{"look": '{"at": "it"}'}], "input_token_count": 9}], [(None, CALLED)]),
        ([{"id": "1", "result": [[[{"look": '{"at": "it"}'}], "Seen."], ["So."]], "latency": [[1, 1], [1]]}],
         [(None, CALLED), (None, "Seen."), (None, "So.")]),
        ([{"id": "1", "result": [], "latency": 1.5}], []),
    ],
    "request and response": [
        ([{"input": {"messages": [USER]}, "output": {"messages": [USER, CALLING, RESULT, ANSWER]}}], LOOKED),
        ([{"messages": [USER], "response": {"reasoning_content": "Hm.", "text": "Because."}}], [(["Why?"], "Hm.\n\nBecause.")]),
        ([{"req": [USER], "resp": "Because."}], ANSWERED),
        ([{"type": "GENERATION", "input": [USER], "output": ANSWER}], ANSWERED),
        ([{"type": "GENERATION", "input": json.dumps([USER]), "output": json.dumps(ANSWER)}], ANSWERED),
        ([{"type": "SPAN", "input": {"q": "x"}, "output": {"documents": ["x"]}}], []),
        ([{"run_type": "llm", "inputs": {"messages": [[{"lc": 1, "type": "constructor", "id": ["langchain", "HumanMessage"], "kwargs": {"content": "Why?"}}]]},
           "outputs": {"generations": [[{"text": "Because.", "message": {"kwargs": {"content": "Because."}}}]]}}], ANSWERED),
        ([{"run_type": "llm", "inputs": {"messages": [{"type": "human", "content": "Why?"}]},
           "outputs": {"output": {"type": "ai", "content": "", "tool_calls": [{"name": "look", "args": {"at": "it"}, "id": "1"}]}}}],
         [(["Why?"], CALLED)]),
        ([{"run_type": "chain", "inputs": {"messages": [USER]}, "outputs": {"messages": [USER, ANSWER]}}], []),
        ([{"run_type": "chain", "inputs": {"question": "Why?"}, "outputs": {"answer": "Because."}, "child_runs": [
            {"run_type": "tool", "inputs": {"input": "x"}, "outputs": {"output": "y"}},
            {"run_type": "llm", "inputs": {"messages": [USER]}, "outputs": {"generations": [[{"text": "Because."}]]}}]}], ANSWERED),
        ([{"command": "chat", "request": {"messages": [USER]}, "response": {"choices": CHOICES}}], ANSWERED),
        ([{"custom_id": "1", "request": {"body": {"messages": [USER]}}, "response": {"status_code": 200, "body": {"choices": CHOICES}}}],
         ANSWERED),
        ([{"custom_id": "1", "response": {"body": {"choices": CHOICES}}, "error": None}], ALONE),
        ([{"body": {"messages": [USER]}, "response": {"body": {"choices": CHOICES}}}], ANSWERED),
        ([{"request": {"body": {"messages": [USER]}}, "response": {"body": {"__type__": "x", "__data__": {"choices": CHOICES}}}}],
         ANSWERED),
        ([{"request": {"body": {"messages": [USER]}}, "response": {"body": [{"__data__": one} for one in deltas({"content": "a"}, {"content": "b"})]}}],
         [(["Why?"], "ab")]),
        ([{"body": {"inputText": "Why?"}, "response": {"results": [{"tokenCount": 1, "outputText": "Because.", "completionReason": "FINISH"}]}}],
         [("Why?", "Because.")]),
        ([{"request": json.dumps({"messages": [USER]}), "response": json.dumps({"choices": CHOICES})}], ANSWERED),
        ([{"request_body": {"messages": [USER]}, "response_body": {"choices": CHOICES}}], ANSWERED),
        ([{"custom_id": "a", "result": {"type": "succeeded", "message": {"type": "message", "role": "assistant", "content": [
            {"type": "text", "text": "Because."}]}}}], ALONE),
        ([{"request": {"system": [{"type": "text", "text": "Be short."}], "messages": [
            USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {"at": "it"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "seen"}, {"type": "text", "text": "So?"}]}]},
           "response": {"role": "assistant", "content": [{"type": "text", "text": "Because."}]}}],
         [(["Be short.", "Why?", CALLED, "seen", "So?"], "Because.")]),
        ([{"messages": json.dumps([USER]), "call_type": "completion", "response": json.dumps({"choices": CHOICES})}], ANSWERED),
        ([{"request": {"messages": [USER]}, "response": deltas({"content": "Be"}, {"content": "cause."})}], ANSWERED),
        *(([{"request": json.dumps({"messages": [USER]}), "response": body}], ANSWERED) for body in BODIES),
        *(([{"request": body, "response": "Because."}], ANSWERED) for body in REQUESTS),
        ([{"request": {"messages": [USER]}, "response": PIECES}], [(["Why?"], WRITTEN)]),
        ([{"request": {"messages": [USER]}, "response": json.dumps(PIECES)}], [(["Why?"], WRITTEN)]),
        ([{"request": {"messages": [USER]}, "response": "".join(f"data: {json.dumps(one)}\n\n" for one in deltas(
            {"content": "Be"}, {"content": "cause."})) + "data: [DONE]\n\n"}], ANSWERED),
        ([{"request": {"model": "m"}, "response": [{"contentBlockDelta": {"delta": {"text": text}}} for text in ("Be", "cause.")]}],
         ALONE),
        ([{"request": {"contents": [{"parts": [{"text": "q"}], "role": "user"}]},
           "response": {"candidates": [{"content": {"parts": [{"text": "Because."}]}}]}}], [(["q"], "Because.")]),
        ([{"request": {"messages": [USER]}, "response": [{"candidates": [{"content": {"parts": [{"text": text}]}}]} for text in ("Be", "cause.")]}],
         ANSWERED),
        ([{"input": json.dumps({"messages": [PARTS | {"role": "user"}]}), "output": '{"text": "So.", "finish_reason": "stop"}'}],
         [(["Because."], "So.")]),
        ([{"input": {"inputBodyJson": {"messages": [USER]}}, "output": {"outputBodyJson": ANSWER}}], ANSWERED),
        ([{"request": {"input": "Why?"}, "response": {"output": [ANSWER | {"type": "message"}]}}], ANSWERED),
        ([{"request": {"messages": [USER]}, "response": {"model": "m", "message": ANSWER, "done": True}}], ANSWERED),
        ([{"input": {"prompt": "p"}, "output": ["Be", "cause", "."], "status": "succeeded"}], [("p", "Because.")]),
    ],
    "OpenAI batch, input": [([{"custom_id": "1", "method": "POST", "body": {"messages": [USER, ANSWER, USER]}}], [])],
    "HTTP, recorded response": [
        ([{"status": 200, "headers": {}, "body": "".join(f"event: x\ndata: {json.dumps(one)}\n\n" for one in deltas({"content": "a"}, {"content": "b"}))}],
         [(None, "ab")]),
        ([{"status": 200, "headers": {}, "body": json.dumps({"choices": CHOICES})}], ALONE),
    ],
    "token ids with a mask": [
        ([{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}], [([1, 2], [3, 4])]),
        ([{"input_ids": np.array([1, 2, 3, 4]), "labels": np.array([-100, 2, -100, 4])}], [([1], [2]), ([1, 2, 3], [4])]),
        ([{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}], [([1], [2, 3])]),
        ([{"input_ids": [1, 2], "labels": [1, 2]}], [(None, [1, 2])]),
    ],
    "token ids": [
        ([{"prompt_token_ids": [1], "token_ids": [2, 3]}], [([1], [2, 3])]),
        ([{"prompt_token_ids": [1], "completion_token_ids": [2]}], [([1], [2])]),
        ([{"input_ids": [1], "output_ids": [2]}], [([1], [2])]),
        ([{"prompt": "p", "completion": "c", "token_ids": [2]}], [(None, [2])]),
    ],
    "lm-eval": [
        ([{"doc": {"answer": "gold"}, "arguments": {"gen_args_0": {"arg_0": "Q"}}, "resps": [["one", "two"]], "filtered_resps": ["1"]}],
         [("Q", "one"), ("Q", "two")]),
        ([{"arguments": [["Q", {"until": []}]], "resps": [["one"]]}], [("Q", "one")]),
        ([{"arguments": {"gen_args_0": {"arg_0": [json.dumps([USER])]}}, "resps": [["one"]]}], [(["Why?"], "one")]),
        ([{"arguments": [["Q", " A"]], "resps": [[["-3.0", "False"]]]}], []),
    ],
    "TRL and DPO, preferences": [
        ([{"prompt": [USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "No."}]}], ANSWERED),
        ([{"prompt": "p", "chosen": "good", "rejected": "bad"}], [("p", "good")]),
        ([{"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER]}], [(["Why?", "Because.", "Why?"], "Because.")]),
        ([{"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"}, "rejected": {}}], [(["a"], "b")]),
        ([{"chosen": "\n\nHuman: Why?\n\nAssistant: Because.", "rejected": "x"}], [("\n\nHuman: Why?\n\nAssistant:", "Because.")]),
    ],
    "OpenHands, history": [
        ([{"instance_id": "i", "instruction": "Why?", "history": [
            [{"source": "user", "action": "message", "args": {"content": "Why?"}}, {}],
            [{"source": "agent", "action": "run", "args": {"command": "ls", "thought": "I look."}}, {"observation": "run", "content": "a"}]]}],
         [(["Why?"], 'I look.\n\n{"name": "run", "arguments": {"command": "ls"}}')]),
    ],
    "SWE-agent, steps": [
        ([{"trajectory": [{"action": "ls", "observation": "a", "response": "I look."}, {"response": "So."}]}],
         [(None, "I look."), (["I look.", "a"], "So.")]),
        ([{"trajectory": [{"response": "No."}, {"response": "Because."}], "history": [USER, ANSWER]}], [(["Why?"], "Because."), (None, "No.")]),
        ([{"trajectory": [{"response": "x"}], "history": [USER, ANSWER | {"thought": "x", "action": "x"}], "info": {}}], ANSWERED),
    ],
    "Harbor, trajectory": [
        ([{"schema_version": "ATIF-v1.7", "steps": [
            {"step_id": 1, "source": "system", "message": "Be short."}, {"step_id": 2, "source": "user", "message": "Why?"},
            {"step_id": 3, "source": "agent", "message": "I look.", "reasoning_content": "Hm.",
             "tool_calls": [{"tool_call_id": "1", "function_name": "look", "arguments": {"at": "it"}}],
             "observation": {"results": [{"source_call_id": "1", "content": "seen"}]}},
            {"step_id": 4, "source": "agent", "message": "So.", "metrics": {"completion_token_ids": [5]}}],
           "subagent_trajectories": [{"steps": [{"source": "user", "message": "a"}, {"source": "agent", "message": "b"}]}]}],
         [(["Be short.", "Why?"], f"Hm.\n\nI look.\n\n{CALLED}"),
          (["Be short.", "Why?", f"Hm.\n\nI look.\n\n{CALLED}", "seen"], "So."), (["a"], "b")]),
    ],
    "prompt and completion": [
        ([{"event": "llm_tool_round", "requests": [{"messages": [USER]}, {"messages": [USER, CALLING, RESULT]}],
           "responses": [{"collected_content": "", "tool_calls": [CALL]}, {"collected_content": "Because.", "tool_calls": []}]}],
         LOOKED),
        ([{"prompt": "p", "response": "a long answer of the model", "reasoning": "Hm: a long answer of the model, that is what I say."}],
         [("p", "Hm: a long answer of the model, that is what I say.\n\na long answer of the model")]),
        ([{"date": "x", "generated_texts": ["a", "", "b"], "input_lens": [3, 3, 3]}], [(None, "a"), (None, "b")]),
        ([{"responses": [{"message": ANSWER}, {"message": ANSWER}]}], ALONE * 2),
        ([{"messages": [USER], "response": "r"}], [(["Why?"], "r")]),
        ([{"prompt": [USER], "completion": [ANSWER]}], ANSWERED),
        ([{"prompt": [USER], "completion": [CALLING, RESULT, ANSWER]}], LOOKED),
        ([{"prompt": "p", "completion": "c", "exit_code": 0, "stdout": ""}], [("p", "c")]),
        ([{"input": "p", "actual_output": "c", "expected_output": "gold"}], [("p", "c")]),
        ([{"model_name": "ensemble", "text_output": "c"}], [(None, "c")]),
        ([{"prompt": "p", "kwargs": {"temperature": 0}, "response": "r"}], [("p", "r")]),
        ([{"prompts": ["p", "q"], "completions": ["a", "b"]}], [("p", "a"), ("q", "b")]),
        ([{"prompt": "q", "reasoning": "Hm.", "response": "So."}], [("q", "Hm.\n\nSo.")]),
        ([{"prompt": "q", "model_thinking": "Hm.", "model_response": "So."}], [("q", "Hm.\n\nSo.")]),
        ([{"question": "q", "answer": "gold", "prediction": "pred", "model_output": "written"}], [("q", "written")]),
        ([{"prompt": "p", "completions": [{"model": "m", "completion": "c"}]}], [("p", "c")]),
        ([{"prompt": np.array([1]), "response": np.array([2, 3])}], [([1], [2, 3])]),
        ([{"type": "chat", "session_id": "s", "prompt": "p", "response": "r"}], [("p", "r")]),
        ([{"source": "x", "observation": "o", "prompt": "p", "response": "r"}], [("p", "r")]),
        ([{"messages": [USER, ANSWER], "generations": ["a", "b"]}], [(["Why?"], "a"), (["Why?"], "b")]),
        *(([{"prompt": "p", "response": text}], [("p", text)]) for text in WRITTEN_JSON),
        ([{"prompt": "p", "completion": PIECES}], [("p", WRITTEN)]),
        ([{"prompt": "p", "completion": "c", "reasoning": "high"}], [("p", "c")]),
        ([{"prompt": "p", "completion": "good", "label": True}, {"prompt": "p", "completion": "bad", "label": False}], [("p", "good")]),
        ([{"question": "q", "response": "", "answer": "gold"}], []),
        ([{"question": "q", "prediction": "written", "reference": "a longer reference"}], [("q", "written")]),
        ([{"prompt": "p", "completion": ["a", "stop"]}, {"prompt": "p", "completions": [["b", "length"], ["c", None]]}],
         [("p", "a"), ("p", "b"), ("p", "c")]),
        ([{"prompt": "p", "responses": ["a", "", "b", "c"], "thinking": ["Hm.", "Hm?", "Hm!", None]}],
         [("p", "Hm.\n\na"), ("p", "Hm!\n\nb"), ("p", "c")]),
    ],
    "HumanEval, EvalPlus, LiveCodeBench": [
        ([{"task_id": "HumanEval/0", "solution": "def f(): pass"}], [(None, "def f(): pass")]),
        ([{"question_id": "1", "code_list": ["a", "b"]}], [(None, "a"), (None, "b")]),
        ([{"prompt": "p", "test": "t", "is_solved": True, "solution": "s", "implementations": ["i", "s"], "reflections": ["r"]}],
         [("p", "i"), ("p", "s")]),
    ],
    "conversation": [
        ([{"info": {"id": "s", "agent": "build"}, "messages": OPENCODE}], STEPS),
        ([{"model_answer": "Because", "history": [{"role_name": "User", "content": "Why?"}, {"role_name": "Assistant", "content": "Because."}]}],
         ANSWERED),
        ([{"aider": [USER, ANSWER]}], ANSWERED),
        ([{"input": "x", "message_log": [USER, ANSWER, USER, ANSWER], "output": "Because."}],
         [(["Why?"], "Because."), (["Why?", "Because.", "Why?"], "Because.")]),
        ([{"messages": [{"type": "user", "content": "Why?"}, {"type": "info", "content": "x"}, {"type": "gemini", "content": "So."}]}],
         [(["Why?"], "So.")]),
        ([{"messages": [{"text": "Why?", "sender": "User", "isCreatedByUser": True},
                        {"text": "So.", "sender": "Claude 9", "isCreatedByUser": False}]}], [(["Why?"], "So.")]),
        ([{"events": [{"author": "user", "content": {"role": "user", "parts": [{"text": "Why?"}]}},
                      {"author": "a", "content": {"role": "model", "parts": [{"function_call": {"name": "look", "args": {"at": "it"}}}]}},
                      {"author": "a", "content": {"role": "user", "parts": [{"function_response": {"response": {"output": "seen"}}}]}},
                      {"author": "a", "content": {"role": "model", "parts": [{"text": "So."}]}}]}],
         [(["Why?"], CALLED), (["Why?", CALLED, "seen"], "So.")]),
        ([{"conversation": [{"human": "Why?", "assistant": "So."}, {"human": "And?", "assistant": "No."}]}],
         [(["Why?"], "So."), (["Why?", "So.", "And?"], "No.")]),
        ([{"history": [{"role": "human", "content": "Why?"}, {"role": "assistant", "result": "So."}]}], [(["Why?"], "So.")]),
        ([{"messages": [ANSWER]}], ALONE),
        ([{"messages": [USER, {"role": "assistant", "blocks": [{"block_type": "text", "text": "So."}]}]}], [(["Why?"], "So.")]),
        ([{"messages": [USER, ANSWER], "response": None}], ANSWERED),
        ([{"messages": [USER, BROKEN, RESULT, ANSWER]}], [(["Why?"], "Well."), (["Why?", "Well.", "seen"], "Because.")]),
        ([{"messages": [USER, {"role": "assistant", "function_call": {"name": "look", "arguments": '{"at": "it"}'}},
                        {"role": "function", "name": "look", "content": "seen"}, ANSWER]}], LOOKED),
        ([{"messages": [USER, {"role": "model", "content": "m"}]}], [(["Why?"], "m")]),
        ([{"messages": [USER, {"role": "assistant", "content": [
            {"type": "text", "text": "I look."}, {"type": "toolRequest", "id": "1", "toolCall": {"status": "success", "value": {"name": "look", "arguments": {"at": "it"}}}}]},
            {"role": "user", "content": [{"type": "toolResponse", "id": "1", "toolResult": {"status": "success", "value": [{"type": "text", "text": "seen"}]}}]}, ANSWER]}],
         [(["Why?"], f"I look.\n\n{CALLED}"), (["Why?", f"I look.\n\n{CALLED}", "seen"], "Because.")]),
        *(([{"messages": [USER, {"role": "assistant", "parts": [{"type": "text", "text": "I look."}, part]}, ANSWER]}],
          [(["Why?"], f"I look.\n\n{CALLED}"), (["Why?", f"I look.\n\n{CALLED}", '{"x": 1}'], "Because.")]) for part in VERCEL),
        ([{"messages": [THREADED | {"created_at": 2}, THREADED | {"created_at": 1, "role": "user"}]}], [(["Because."], "Because.")]),
        ([{"messages": [USER, {"role": "assistant", "content": {"answer": "a"}}]}], [(["Why?"], '{"answer": "a"}')]),
        ([{"uid": "1", "messages": [USER, {"role": "assistant", "content": {"answer": "a"}}]}], [(["Why?"], "a")]),
        ([{"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}]}], [(["Why?", "Because.", "Why?"], "Because.")]),
        ([{"conversations": [{"from": "human", "value": "a", "loss": None}, {"from": "gpt", "value": "b", "loss": False}, {"from": "gpt", "value": "c", "loss": True}]}],
         [(["a", "b"], "c")]),
        ([{"messages": [USER, {"role": "assistant", "content": [{"type": "reasoning", "value": "Hm."}, {"type": "text", "value": "So."}]}]}],
         [(["Why?"], "Hm.\n\nSo.")]),
        ([{"messages": [USER, ANSWER], "answer": "gold"}], ANSWERED),
        ([{"messages": [USER, ANSWER], "prediction": "B"}], ANSWERED),
        ([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "Be short."}], [(["Be short.", "a"], "b")]),
        ([{"conversations": [{"from": "user", "value": "a"}, {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "it"}}'},
                             {"from": "observation", "value": "seen"}, {"from": "chatgpt", "value": "b"}]}],
         [(["a"], CALLED), (["a", CALLED, "seen"], "b")]),
        ([{"conversation": [USER, ANSWER], "model": "m"}], ANSWERED),
        ([{"task_id": 0, "traj": [USER, CALLING, RESULT, ANSWER], "info": {"task": {"instruction": "x"}}}], LOOKED),
        ([{"info": {"model_stats": {}}, "messages": [USER, ANSWER | {"extra": {"response": {"choices": CHOICES}}}]}], ANSWERED),
    ],
    "input and output": [
        ([{"instruction": "Say it.", "input": "", "output": "a"}], [("Say it.", "a")]),
        ([{"instruction": "Say it.", "input": "it", "output": "a", "generator": "m"}], [("Say it.\nit", "a")]),
        ([{"input": "p", "output": "c"}], [("p", "c")]),
        ([{"model": "m", "output": "c"}], [(None, "c")]),
        ([{"prompt": "p", "output": [["nested"]]}], [("p", "nested")]),
        ([{"model_input": "<u>q<a>", "chat_history": ["q"], "output": ["a"], "answer": "gold"}], [("<u>q<a>", "a")]),
        ([{"prompt": "p", "outputs": [{"index": 0, "text": "a", "token_ids": [1]}]}], [("p", [1])]),
    ],
    "question and answer of a model": [
        ([{"question": "q", "answer": "a", "contexts": ["c"], "ground_truth": "gold"}], [("q", "a")]),
    ],
    "text": [
        ([{"text": "t", "meta": {}}], [(None, "t")]),
        ([{"text": "t", "question_id": 1, "model_id": "m"}], [(None, "t")]),
        ([{"text": "<s>[INST] Why? [/INST] Because. </s><s>[INST] And? [/INST] So."}],
         [("<s>[INST] Why? [/INST]", "Because."), ("<s>[INST] Why? [/INST] Because. </s><s>[INST] And? [/INST]", "So.")]),
        ([{"text": "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n"}],
         [("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant", "Because.")]),
        ([{"text": "### Human: Why?### Assistant: Because.", "label": 1}], [("### Human: Why?### Assistant:", "Because.")]),
    ],
    "all token ids": [
        ([{"input_ids": [1, 2]}], [(None, [1, 2])]),
        ([{"tokens": [4_294_967_294, 0]}], [(None, [4_294_967_294, 0])]),
    ],
    "records inside of others": [
        ([{"eval": {"task": "t"}, "plan": {"steps": []}, "samples": [
            {"id": 1, "epoch": 1, "messages": [USER, {"role": "assistant", "content": "So.", "tool_calls": [
                {"id": "1", "function": "look", "arguments": {"at": "it"}, "type": "function"}]}], "output": {"choices": CHOICES}}]}],
         [(["Why?"], f"So.\n\n{CALLED}")]),
        ([{"run_info": {"api_calls": [{"type": "Tool", "output": "x", "children": [
            {"type": "LLM", "inputs": {"messages": [USER]}, "output": {"choices": CHOICES}}]}]}}], ANSWERED),
        ([{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": name, "attributes": [
            {"key": "gen_ai.operation.name", "value": {"stringValue": name}},
            {"key": "gen_ai.output.messages", "value": {"stringValue": json.dumps([ANSWER])}}]} for name in ("chat", "invoke_agent")]}]}]}],
         ALONE),
        ([{"tests": [{"id": "1", "input": "p"}], "runs": [{"model": "m", "samples": [{"id": "1", "output": "a"}]}]}], [(None, "a")]),
        ([{"model": "m", "results": [{"prompt": "p", "completion": "c"}, {"prompt": "q", "completion": "d"}]}], [("p", "c"), ("q", "d")]),
        ([{"info": {}, "tasks": [{"messages": [USER, ANSWER]}], "simulations": [{"id": 1, "messages": [USER, ANSWER]}]}], ANSWERED),
        ([{"0": {"log": {"turns": [USER, ANSWER]}}, "1": {"log": {"turns": [USER, ANSWER]}}}], ANSWERED * 2),
        ([{"request_states": [{"request": {"prompt": "p"}, "result": {"completions": [{"text": "t"}]}}]}], [("p", "t")]),
        ([{"events": [{"event": "model", "input": [USER], "output": {"choices": CHOICES}},
                      {"event": "tool", "arguments": {"at": "it"}, "result": "seen"}]}], ANSWERED),
        ([[USER, ANSWER]], ANSWERED),
        ([{"train_messages": [[USER, ANSWER], [USER, ANSWER, USER, ANSWER], [USER, ANSWER, RESULT, ANSWER, CALLING]]}],
         [(["Why?"], "Because."), (["Why?", "Because.", "seen"], "Because."), (["Why?", "Because.", "seen", "Because."], CALLED)]),
        ([{"chats": [[USER, ANSWER], [USER, {"role": "assistant", "content": "So."}, USER, ANSWER]]}],
         [(["Why?"], "Because."), (["Why?"], "So."), (["Why?", "So.", "Why?"], "Because.")]),
        ([{"state": {"history": [USER, ANSWER]}, "task": {"prompt": "p", "reference": "gold"}}], ANSWERED),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "records", "expected"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_every_format_is_read(name, records, expected):
    assert outputs(*records) == expected
    assert {read.format for read in reads(*records)} <= {name}
    for record in records:
        assert isinstance(record, list) or name == "records inside of others" or set(record) & FIELDS, (
            "not read of a table"
        )


def test_every_format_has_a_case_and_a_row_in_the_documentation():
    assert list(CASES) == [row.name for row in FORMATS]
    section = (ROOT / "docs" / "operations.md").read_text().split("## Warm up")[1].split("\n## ")[0]
    documented = re.findall(r"^\| ([^|`]+) \| ((?:`[\w.-]+`(?: or |, )?)*) ?\|", section, re.MULTILINE)
    documented = [row for row in documented if row[0] in CASES]  # Not those of other tables
    fields = [
        ", ".join(" or ".join(f"`{name}`" for name in field.split("|")) for field in row.fields.split())
        for row in FORMATS
    ]
    assert documented == list(zip(CASES, fields, strict=True))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (["text"], f"{NO_FORMAT}; if all values are outputs, give --field '*'"),
        ({"chosen": ["choosen"], "question": ["qestion"]}, f"{NO_FORMAT} in a record with the fields chosen, question{ANY_FIELD}"),
        ({"name": "clear", "inputSchema": {}, "response": {"content": [{"type": "text", "text": "x"}]}}, NOT_A_MODEL),
        ("text", NOT_A_RECORD),
        (None, NOT_A_RECORD),
        ({}, NO_FORMAT),
        ([{"role": ["user"], "type": ["tool_use"], "content": [{"type": {"a": 1}}]}], NO_FORMAT),
        ({"messages": [USER]}, NO_ANSWER),
        ({"candidates": True, "message": {"role": "user"}, "done": True}, NO_OUTPUT),
        (USER, NO_ANSWER),
        (claude("user", "Why?"), NO_ANSWER),
        ({"type": "response.output_text.delta", "delta": "a"}, NO_ANSWER),
        ({"custom_id": "1", "response": None, "error": {"code": "x"}}, NO_OUTPUT),
        ({"messages": [USER, ANSWER, USER], "response": None, "status": "failure"}, NO_OUTPUT),
        ({"request": {"messages": [USER, ANSWER, USER]}, "response": {"error": "x"}}, NO_OUTPUT),
        ({"request": {"messages": [USER]}, "response": '{"error": {"message": "Rate limit", "type": "tokens"}}'}, NO_OUTPUT),
        ({"request": {"messages": [USER]}, "response": "Server Error", "status": 500}, FAILED_REQUEST),
        ({"prompt": "p", "completion": "Too many requests", "status_code": "429"}, FAILED_REQUEST),
        ({"request": {"messages": [USER]}, "response": {"status": 503, "text": "Unavailable"}}, FAILED_REQUEST),
        ({"request": {"messages": [USER]}, "response": RESPONSE[:-9]}, BROKEN_BODY),
        ({"request": {"messages": [USER]}, "response": {"body": RESPONSE[:-9]}}, BROKEN_BODY),
        ({"request": {"messages": [USER]}, "response": str(json.loads(RESPONSE))[:-9]}, BROKEN_BODY),
        ({"prompt": "p", "completion": f"{RESPONSE[:60]}... [truncated]"}, BROKEN_BODY),
        *(({"prompt": "p", "response": body[:-1]}, BROKEN_BODY) for body in (
            json.dumps({"type": "message", "role": "assistant", "content": []}), json.dumps({"candidates": [{"content": {"parts": []}}]}),
            json.dumps({"model": "m", "message": ANSWER}), '{"error": {"message": "Rate limit"}}')),
        ({"gen_ai.input.messages": "[]", "gen_ai.output.messages": json.dumps([PARTS])[:-9]}, BROKEN_BODY),
        ({"request": {"messages": [USER]}, "response": 'event: message_start\ndata: {"type": "message_start", "mess'}, BROKEN_STREAM),
        ({"text": "Be", "meta_info": {"id": "1", "finish_reason": None}}, REPEATED),
        ({"prompt": "p", "response": {"stdout": "a b", "gpt_score": "1"}}, NO_OUTPUT),
        ({"prompt": "p", "result": {"1": "passed"}}, NO_OUTPUT),
        ({"messages": [USER, ANSWER, USER], "choices": [{"message": {"role": "assistant", "content": None}}]}, NO_OUTPUT),
        ({"choices": [{"message": BROKEN | {"content": None}}]}, BROKEN_CALL),
        ({"choices": [{"message": {"tool_calls": [{"function": {}}]}}]}, NAMELESS_CALL),
        ({"output": [{"type": "web_search_call", "action": {"query": "x"}}]}, SERVER_CALL),
        ({"output": [{"type": "message", "role": "assistant", "content": []}, {"type": "mcp_list_tools"}]}, NOT_A_MESSAGE),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, NO_CONTENT),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, UNTRAINED),
        ({"prompt": "p", "completion": "c", "label": False}, REJECTED),
        ({"custom_id": "1", "body": {"messages": [USER]}}, NO_RESPONSE),
        ({"span_kind": "TOOL", "attributes": {"output.value": "x", "llm.output_messages.0.message.content": "x"}}, NOT_A_MODEL),
        ({"run_type": "tool", "inputs": {"input": "x"}, "outputs": {"output": "x"}}, NOT_A_MODEL),
        ({"type": "tool.execution_complete", "data": {"result": {"content": "x"}}}, NO_ANSWER),
        ({"type": "tool.result", "result": {"output": "x"}}, NOT_A_MODEL),
        ({"gen_ai.operation.name": "execute_tool", "input": "x", "output": "y"}, NOT_A_MODEL),
        ({"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "x"}]}}, NOT_A_MODEL),
        ({"name": "look", "arguments": {"at": "it"}, "result": {"content": "x"}}, NOT_A_MODEL),
        ({"instruction": "List.", "command": "ls", "output": "x"}, NOT_A_MODEL),
        ({"tool": "search", "input": "x", "output": "y"}, NOT_A_MODEL),
        ({"op_name": "get_weather", "inputs": {"city": "x"}, "output": "rain"}, NOT_A_MODEL),
        ({"span_attributes": {"type": "task"}, "input": "x", "output": "y"}, NOT_A_MODEL),
        ({"type": "general", "input": {"question": "q"}, "output": {"output": "y"}}, NOT_A_MODEL),
        ({"messages": [USER], "response": "ModelResponse(id='c', choices=[])"}, PRINTED_OBJECT),
        ({"prompt": "p", "response": "content='So.' additional_kwargs={} response_metadata={}"}, PRINTED_OBJECT),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "newToolRequest"}]}]}, SERVER_CALL),
        ({"messages": [USER, {"role": "assistant", "content": [{"toolCall": {"value": 3}}]}]}, NAMELESS_CALL),
        ({"gen_ai.operation.name": "invoke_agent", "input": "x", "output": "y"}, NOT_A_MODEL),
        ({"span_kind": "TOOL", "input": "x", "output": "y"}, NOT_A_MODEL),
        ({"body": {"messages": [USER]}, "response": "000000b000000052f080e7a50b3a6576656e742d74797065"}, BINARY),
        ({"body": {"messages": [USER]}, "response": ["1f8b0800000000000003ab56caad2c48"]}, BINARY),
        ({"request": {"messages": [USER]}, "response": b64encode(b"\0Because" * 20).decode()}, BINARY),
        ({"request": {}, "response": {"headers": {}, "content": {"data": "AAEC/w==", "encoding": "base64"}}}, ENCODED),
        ({"type": "functionResponse", "prompt": "p", "response": "x"}, NOT_A_MODEL),
        ({"type": "user.message", "text": "x"}, NOT_A_MODEL),
        ({"name": "ls", "toolCallId": "1", "input": "ls", "output": "x"}, NOT_A_MODEL),
        ({"resps": [[["-1.0", "True"]]]}, SCORES),
        ({"question": "q", "pred": ["18"], "code": ["print(16 + 2)\n```output\n18\n```"]}, SHORTER),
        ({"question": "q", "pred": "18", "solution": "16 and 2 are 18, so the answer is 18."}, SHORTER),
        ({"question": "q", "prediction": "B", "raw_text": "", "model_reasoning": "It is not A, so it is B."}, SHORTER),
        ({"input": "q", "prediction": "B", "output": "a reference, which is longer"}, SHORTER),
        ({"prompt": "p", "response": {"gpt35": "a b", "vicuna": "c d"}}, NO_OUTPUT),
        ({"messages": [USER, {"role": "assistant", "parts": [{"type": "text", "text": "Bec", "state": "streaming"}]}]}, UNFINISHED),
        ({"messages": [OPENCODE[0], opencode("assistant", {"type": "tool", "tool": "look", "state": {"status": "pending"}})]}, UNFINISHED),
        ({"type": "SPAN", "input": "x", "output": "y"}, NOT_A_MODEL),
        ({"token_ids": [1, -1]}, BAD_IDS),
        ({"token_ids": [4_294_967_295]}, BAD_IDS),
        ({"token_ids": [1.5]}, BAD_IDS),
        ({"token_ids": [1, None]}, BAD_IDS),
        ({"contentBlockDelta": {"delta": {"text": "Because."}}, "candidates": False}, NO_OUTPUT),
    ],
)  # fmt: skip
def test_a_record_without_an_output_has_one_reason(record, reason):
    assert outputs(record) == []
    assert skipped(record) == [reason]


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ({"question": "q", "answer": "gold"}, ("answer, question", "--field question --field answer")),
        ({"prompt": "p", "canonical_solution": "s", "test": "t", "task_id": "1"}, ("canonical_solution, prompt, task_id, test",)),
        ({"question": "q", "choices": ["a", "b"], "answer": "a"}, ("answer, choices, question",)),
        ({"question": "q", "m": {"solution": "s"}}, ("m, question", "--field question --field m.solution")),
        ({"respones": "typo"}, ("respones",)),
        ({"instruction": "i", "output_1": "a", "output_2": "b"}, ("if output_* is", "--field instruction --field 'output_*'")),
        ({"question": "q", "answer": "x", "truth": "long " * 20, "context": "long " * 40}, ("--field question --field answer",)),
        ({"instance_id": "1", "model_patch": "diff --git a b"}, ("--field model_patch",)),
        ({"question": "q", "first_response": "a long answer", "grader_output": "a judge's text, which is longer"}, ("--field first_response",)),
        ({"output": "o", "code": "c", "input": "i"}, ("code, input, output", "--field input --field output")),
        ({"task_id": "1", "final_result": "failed", "steps": [{"action": "go to it", "observation": "You are there."}]}, ("--field steps.action",)),
        ({"question": "q", "answer": "It is so.", "output_tokens": 9, "promptTokens": 9}, ("--field question --field answer",)),
        ({"query": "q", "input_docs": ["d"], "llm_raw": "It is so."}, ("--field query --field llm_raw",)),
        ({"case_id": "1", "final_text": "It is so."}, ("--field final_text",)),
        ({"user": "Why?", "bot": "Because."}, ("--field bot",)),
        ({"user_prompt": "Why?", "gpt_answer": "It is so."}, ("--field user_prompt --field gpt_answer",)),
        ({"id": "simple_0", "result": "f(x=1) and so on"}, ("--field result",)),
        ({"messages": [USER, ANSWER], "rejected_messages": []} | {"messages": "none"}, ("messages, rejected_messages",)),
        ({"query": "q", "gt": "gold", "m-1_pred": "It is so."}, ("--field query --field m-1_pred",)),
        ({"generator": "m", "code": "x = 1", "language": "python"}, ("--field code",)),
        ({"question": "q", "response_A": "x", "response_B": "It is y.", "response_model": "m"}, ("--field question --field 'response_?'",)),
        ({"question": "q", "a": {"solution": "x"}, "b": {"solution": "It is y."}}, ("--field question --field '*.solution'",)),
        ({"a": {"solution": "It is x."}, "b": {"solution": "It is y."}, "gold": {"solution": "z"}}, ("--field a.solution",)),
        ({"raw_generations": {f"sample_{index}": ["f(x)"] for index in range(9)}}, ("--field 'raw_generations.sample_*'",)),
        ({str(index): "select it" for index in range(20)}, ("if all values are outputs, give --field '*'",)),
        ({str(index): {"query": "q", "turns": {"actions": ["look"]}} for index in range(20)}, ("--field '*.turns.actions'",)),
        ({f"owner/{'name' * 20}": {"instance_id": "1", "model_patch": "diff --git a b"}}, ("--field '*.model_patch'",)),
    ],
)  # fmt: skip
def test_refusals_name_fields_and_the_option(record, parts):
    (reason,) = skipped(record)
    assert reason.startswith(NO_FORMAT)
    for part in parts:
        assert part in reason


def test_refusals_name_the_nearest_format():
    (reason,) = skipped({"task_id": "1", "language": "C", "program": "main()"})
    assert "the nearest format is HumanEval, EvalPlus, LiveCodeBench (solution or code_list, task_id" in reason
    (reason,) = skipped({"language": "C", "program": "main()"})
    assert "nearest" not in reason


def test_a_field_that_is_empty_in_the_first_records_is_suggested():
    *before, reason, after = skipped(*({"prompt": "p", "answer": answer} for answer in ("", "", "It is so.", "No.")))
    assert HINT not in "".join(before)
    assert "--field prompt --field answer" in reason
    assert after == reason


@pytest.mark.parametrize(
    "record",
    [
        {"question": "q", "truth": "long " * 20, "context": "long " * 40, "ref_text": "long " * 20},
        {"review": "long " * 20, "rewritten": "long " * 20},
        {"generated": "2026-01-01T00:00:00", "finish_reason": "stop", "test": "long " * 20, "gpt_result": "1"},
        {"type": "notice", "timestamp": "t", "content": "long " * 20},
        {"type": "notice", "timestamp": "t", "text": "long " * 20},
        {"event": "bot", "text": "long " * 20},
        {"speaker": "user", "text": "long " * 20},
        {"id": 1, "type": "message", "date": "t", "from": "Ann", "text": "long " * 20},
        {"question": "Why?", "text": "long " * 20},
        {"question_id": 1, "text": "long " * 20, "category": "generic"},
        {"id": 1, "text": "long " * 20, "labels": "Billing;Refund"},
        {"name": "Ann", "output": "long " * 20},
        {"ts": 1, "type": "say", "say": "task", "text": "long " * 20},
        {
            "object": "thread.message.delta",
            "delta": {"content": [{"index": 0, "type": "text", "text": {"value": "Be"}}]},
        },
        {"step_id": 1, "source": "user", "message": "long " * 20},
        {"turns": [{"role": "user", "shown": {"content": "long " * 20}}]},
        {"role": "narrator", "text": "x"},
        {"type": "user", "content": 3, "text": "x"},
        {"event": {"type": "tool.result", "result": {"output": "x"}}},
        {"event": {"type": "llm.request", "messages": [USER, ANSWER]}},
        {"data": {"toolCallId": "1", "result": {"content": "x"}}},
        {"step": {"result": {"content": "x"}}},
        {"totalTokens": 9, "outputTokens": 9, "final_result": "failed", "finishReason": "stop", "tokens": 3},
        {"user": {"messages": [USER, ANSWER]}},
        {"modalities": {"input": ["text"], "output": ["text"]}},
        {"cells": [{"outputs": [{"name": "stdout", "text": ["x"]}]}]},
        {"type": "mode", "answer_html": "a b"},
        {"chunk": {"object": "text_completion", "choices": [{"text": "Be", "finish_reason": None}]}},
        {"sessionId": "s", "note": "a b"},
        {"sessionId": "s", "prompt": "p"},
    ],
)
def test_texts_that_may_be_of_tools_and_users_are_counted_and_not_read(record):
    assert outputs(record) == []
    assert skipped(record)
    assert HINT not in skipped(record)[0] or {"answer_html", "modalities", "output"} & record.keys()


@pytest.mark.parametrize(
    "content",
    [
        {"data": b64encode(orjson.dumps({"choices": CHOICES})).decode(), "encoding": "base64", "size": 9},
        {"base64_string": b64encode(orjson.dumps({"choices": CHOICES})).decode(), "encoding": "UTF-8"},
        {"text": json.dumps({"choices": CHOICES}), "mimeType": "application/json"},
        {"string": json.dumps({"choices": CHOICES})},
        {"string": f"data: {json.dumps(deltas({'content': 'Because.'})[0])}\n\n", "encoding": "utf-8"},
    ],
)
def test_recorded_bodies_are_decoded(content):
    request = {"headers": {}, "content": {"messages": [USER]}}
    exchange = {"request": request, "response": {"headers": {}, "content": content}}
    failed = {"request": request, "response": {"headers": {}, "content": {"text": "<p>", "mimeType": "text/html"}}}
    assert outputs({"interactions": [exchange, failed, exchange]}) == [(["Why?"], "Because.")] * 2


def test_a_response_that_a_recording_repeats_is_read_once():
    segment = {"candidates": [{"content": {"role": "model", "parts": [{"text": "Because."}]}}]}
    request = {"headers": {}, "body_segments": [{"contents": [{"parts": [{"text": "Why?"}]}]}]}
    response = {"headers": {}, "body_segments": [segment], "sdk_response_segments": [segment]}
    assert outputs({"interactions": [{"request": request, "response": response}]}) == [(["Why?"], "Because.")]


def test_messages_of_a_test_are_counted_beside_other_records():
    case = {"turns": [USER, ANSWER], "results": {"m": {"output": "a b"}}}
    assert outputs({"cases": [case, {"messages": [USER, ANSWER]}]}) == [(["Why?"], "Because.")]
    assert skipped({"cases": [case, {"messages": [USER, ANSWER]}]}) == [OF_A_TEST]


def test_refusals_have_neither_values_nor_names_that_may_be_texts():
    (reason,) = skipped({"secret value": "another secret", "a": "third secret"})
    assert "secret" not in reason
    assert len(skipped(*({f"id{number}": 1} for number in range(100)))) == 100
    (reason,) = skipped({f"id{number}": 1 for number in range(100)})
    assert len(reason) < 300


def test_chunks_of_which_nothing_tells_the_end_are_refused():
    assert outputs(gemini("Because.")) == [(None, "Because.")]
    assert skipped(gemini("Be"), gemini("cause."), gemini("So.")) == [UNNAMED] * 3
    cut = {"candidates": [{"content": {"parts": [{"text": "Be"}]}}]}
    assert skipped(cut, cut) == [UNNAMED] * 2


@pytest.mark.parametrize(
    "event",
    [
        {"type": "ping"},
        {"event": "ping", "data": {"type": "ping"}},
        {"type": "session.created", "session": {"instructions": "Be short.", "tools": []}},
        {"type": "session", "version": 3, "id": "s", "cwd": "/home/a b"},
        {"type": "model_change", "provider": "p", "modelId": "m"},
        {"type": "permission-mode", "permissionMode": "plan", "sessionId": "s"},
        {"type": "last-prompt", "lastPrompt": "Why is it so?", "sessionId": "s"},
        {"sessionId": "s", "projectHash": "p", "startTime": "2026-01-01T00:00:00Z"},
    ],
)
def test_settings_of_sessions_are_not_worth_a_reason(event):
    assert reads(event) == []


def test_a_stream_with_chunks_that_cannot_be_read_is_not_joined():
    first, *_, last = chunks = deltas({"content": "a"}, {"content": "b"}, {"content": "c"})
    assert outputs(first, Unread(NOT_A_RECORD, breaks_streams=True), last) == []
    assert outputs(first, Unread(NOT_A_RECORD, breaks_streams=False), last) == [(None, "ac")]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    lines[1] = lines[1].replace(": ", ":\n", 2)
    assert skipped({"request": {}, "response": "".join(lines)}) == [BROKEN_STREAM]


def test_a_call_of_gemini_in_pieces_costs_only_itself():
    calls = [{"name": "look", "willContinue": True}, {"partialArgs": [{"jsonPath": "$.at", "stringValue": "it"}]}, {}]
    parts = [*({"functionCall": call} for call in calls), {"functionCall": {"name": "look", "args": {"at": "it"}}}]
    ends = [{}, {}, {}, {"finishReason": "STOP"}]
    chunks = [{"responseId": "a", "candidates": [{"content": {"parts": [part]}} | end]}
              for part, end in zip(parts, ends, strict=True)]  # fmt: skip
    assert outputs(*chunks) == [(None, CALLED)]
    assert skipped(*chunks) == [CALL_PIECE, CALL_PIECE]


def test_a_broken_request_costs_only_the_prompt():
    cut = json.dumps({"model": "m", "messages": [USER]})[:-9]
    record = {"request": cut, "response": {"choices": CHOICES}}
    assert outputs(record, {"input": cut, "output": "So."}) == [(None, "Because."), (None, "So.")]
    assert skipped(record) == [BROKEN_BODY]


def test_a_broken_call_costs_only_itself():
    conversation = {"messages": [USER, ANSWER, USER, BROKEN, RESULT, ANSWER]}
    assert [output for _, output in outputs(conversation)] == ["Because.", "Well.", "Because."]
    assert skipped(conversation) == [BROKEN_CALL]
    prompt = {"request": {"messages": [USER, BROKEN, RESULT, USER]}, "response": {"choices": CHOICES}}
    assert outputs(prompt) == [(["Why?", "Well.", "seen", "Why?"], "Because.")]


def test_messages_are_those_of_the_api_for_chat_templates():
    """Names, ids, tools and template arguments are kept; fields that only logs have are not."""
    tool = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
    message = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}],
        "usage": {},
    }
    request = {"messages": [USER | {"id": "x"}, message, {"role": "tool", "name": "look", "tool_call_id": "1", "content": "s"}],
               "tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    (read,) = reads({"request": request, "response": {"choices": CHOICES}})
    (found,) = read.outputs
    assert found.prompt == Chat(
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}]},
            {"role": "tool", "content": "s", "name": "look", "tool_call_id": "1"},
        ],
        [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}],
        {"enable_thinking": False},
    )  # fmt: skip
    (read,) = reads({"messages": [USER], "choices": [{"message": CALLING}]})
    assert read.outputs[0].output == Reply({"role": "assistant", "content": "", "tool_calls": [CALL]})


def test_requests_keep_their_names():
    """Record numbers of a log are not used as names, since other files have the same numbers."""

    def names(*records):
        return [found.request for read in reads(*records) for found in read.outputs]

    assert names({"response": {"id": "chatcmpl-1", "choices": CHOICES}}) == ["chatcmpl-1"]
    assert names({"request_id": "r", "id": "cmpl-1", "choices": CHOICES}) == ["r"]
    assert names({"custom_id": "request-1", "response": {"body": {"choices": CHOICES}}}) == [None]
    assert names({"id": 1, "text": "t"}) == [None]
    assert names(*deltas({"content": "a"}, {"content": "b"})) == ["c"]
    assert names(claude("user", "Why?"), claude("assistant", "So.")) == ["u-So."]


def test_only_unfinished_groups_are_held():
    """An answer is read when its last chunk arrives, not at the end of the file."""
    stream = read_records(Record(one, "") for one in [*deltas({"content": "a"}, {"content": "b"}), {"text": "t"}])
    assert [read.format for read in stream] == ["OpenAI, streamed chunks", "text"]
    unfinished = [CHUNK | {"id": str(number), "choices": [{"delta": {"content": "a"}}]} for number in range(300)]
    stream = read_records(Record(one, "") for one in [*unfinished, {"text": "t"}])
    assert [read.format for read in stream].index("text") == 300 - 256


def test_chunks_with_the_usage_are_not_answers():
    usage = {"usage": {"completion_tokens": 1}}
    records = [*deltas({"content": "a"}), CHUNK | {"choices": []} | usage, *deltas({"content": ""}, **usage)]
    assert outputs(*records) == [(None, "a")]
    assert skipped(*records) == []
    assert skipped(*deltas({"content": ""})) == [NO_ANSWER]


def test_a_system_prompt_begins_the_next_session():
    session = [{"type": "session_meta", "payload": {"instructions": "Be short."}},
               codex(type="message", role="assistant", content=[{"type": "output_text", "text": "So."}])]  # fmt: skip
    assert outputs(*session, *session) == [(["Be short."], "So.")] * 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (("a.b",), [(None, "deep")]),
        (("c.d",), [(None, "dotted")]),
        (("a.b", "c.d", "ids"), [("deep\ndotted", [7])]),
        (("list[].text",), [(None, "one"), (None, "two")]),
        (("list.text",), [(None, "one"), (None, "two")]),
        (("list.1.text",), [(None, "two")]),
        (("a.*",), [(None, "deep")]),
        (("list.*.text",), [(None, "one"), (None, "two")]),
        (("resp*",), [(None, "unused")]),
        (("respons?",), [(None, "unused")]),
        (("chat",), [(["Why?"], "Because.")]),
        (("chat.1",), [(None, "Because.")]),
        (("before", "message"), [(["Why?"], "Because.")]),
        (("encoded.x", "response"), [("in JSON", "unused")]),
        (("samples",), [(None, "s"), (None, "t")]),
        (("events",), [(None, "ab")]),
        (("reply",), [(None, "Because.")]),
        (("call",), [(None, "Because.")]),
    ],
)
def test_configured_fields_are_read(fields, expected):
    record = {
        "a": {"b": "deep"}, "c.d": "dotted", "ids": [7], "response": "unused", "list": [{"text": "one"}, {"text": "two"}],
        "chat": [USER, ANSWER], "before": [USER], "message": ANSWER, "encoded": '{"x": "in JSON"}', "samples": ["s", "t"],
        "reply": json.dumps({"choices": CHOICES}), "call": {"object": "chat.completion", "choices": CHOICES}, "events": "".join(f"data: {json.dumps(one)}\n\n" for one in deltas({"content": "a"}, {"content": "b"})),
    }  # fmt: skip
    assert outputs(record, fields=fields) == expected


@pytest.mark.parametrize(
    "fields", [("x",), ("a",), ("a.b.c",), ("x", "ids"), ("a.b", "ids", "ids"), ("list.5.text",), ("n",)]
)
def test_missing_fields_are_named_with_those_that_are_there(fields):
    (reason,) = skipped({"a": {"b": "deep"}, "ids": [7], "list": [{"text": "t"}], "n": 3}, fields=fields)
    assert reason.startswith((NO_FIELD, f"no field {fields[0]} in"))
    assert "a, ids, list, n" in reason or len(fields) == 3


def test_a_mistyped_field_is_named():
    (reason,) = skipped({"answer": "a", "question": "q"}, fields=("question", "anwser"))
    assert reason == "no field anwser in a record with the fields answer, question"


AIDER = """
# aider chat started at 2026-01-01 10:00:00

> aider --model m{end}
> Git repo: none{end}

#### Write it.{end}
#### In two lines.{end}

a.py
```python
> not a note of aider
#### nor a line of the user
```
Done.

> Tokens: 1k sent, 2 received.{end}
> Applied edit to a.py{end}

#### /run ls{end}

a.py

#### /ask And why?{end}

Because.

# aider chat started at 2026-01-01 11:00:00

#### Hello{end}
"""


def test_the_chat_history_of_aider():
    text = AIDER.format(end="  ")
    code = "a.py\n```python\n> not a note of aider\n#### nor a line of the user\n```\nDone."
    before = ["Write it.\nIn two lines.", code, "/run ls\n/ask And why?"]
    values = list(markdown_chat(text.splitlines(keepends=True)))
    assert outputs(*values) == [
        (before[:1], code),
        (["Write it.\nIn two lines.", code, "/run ls", "/ask And why?"], "Because."),
    ]
    assert skipped(*values) == [NO_ANSWER]
    assert outputs(*markdown_chat(AIDER.format(end="").splitlines()))[-1][1] == "Because."


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
INNER = (
    "role content message function arguments name tool_calls index from value delta type id kwargs data parts input"
    " raw tool_id tool_name models_usage requests responderUsername result metadata toolCallRounds toolCallResults toolCalls"
    " toolCall toolResult toolInvocation toolName children child_runs span_attributes"
    " info state status tool callID turns items action observation source args finish_reason payload sessionId messages generations"
)
KINDS = "tool-look dynamic-tool toolRequest message reasoning function_call function_call_output user assistant text tool_use tool_result thinking ai"
NAMES = st.sampled_from(sorted(FIELDS.union(INNER.split())))
KNOWN = st.sampled_from([USER, ANSWER, [USER, ANSWER], CHOICES, CALLING, BROKEN, "{", '{"a": 1}', *KINDS.split()])
VALUES = st.recursive(
    LEAVES | st.lists(st.integers(-1, 1 << 32), max_size=4) | KNOWN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)


@examples(100)
@given(
    values=st.lists(VALUES, max_size=4), fields=st.lists(st.sampled_from(("a", "messages", "choices.0")), max_size=2)
)
def test_any_values_are_read_or_refused_and_rendered_by_a_template(values, fields, vocabulary):
    for read in reads(*values, fields=tuple(fields)):
        assert read.outputs or read.skipped
        assert bool(read.outputs) <= bool(read.format)
        for found in read.outputs:
            assert isinstance(found.output, Reply) or len(found.output) > 0
            chat = found.prompt if isinstance(found.prompt, Chat) else None
            with suppress(RecordError):
                if isinstance(found.output, Reply):
                    assert vocabulary.chat.reply_text(chat, found.output.message)
                if chat is not None:
                    assert isinstance(vocabulary.chat.prompt_text(chat), str)


def test_records_that_are_nested_too_deeply_are_refused():
    value = {"text": "t"}
    for _ in range(5000):
        value = [value]
    for record in (value, {"messages": value}, {"response": value}, {"completion": value}, {"choices": [{"message": {"content": value}}]},
                   {"role": "assistant", "content": value}):  # fmt: skip
        assert outputs(record) == []
