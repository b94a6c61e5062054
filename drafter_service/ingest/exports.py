"""Records of exports, traces and benchmarks whose outputs are not in a field of their own name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from drafter_service.ingest import chats
from drafter_service.ingest.answers import MODELS, PROMPTS, Found, conversation, exchange, outputs_of, prompt_of
from drafter_service.ingest.chats import ASSISTANT, parsed, words

Value = dict[str, Any]
Reader = Callable[[Value, list[str]], list[Found] | None]
"""Returns the outputs of a record, and adds a reason for each part that is left out to the list; None if the record
does not have the format."""

STEPS = frozenset(
    words("span event tool chain retriever reranker embedding agent guardrail evaluator prompt parser trace")
)
"""Types of steps in traces that are not calls of a model, or repeat those of others."""
OPERATIONS = words("chat text_completion generate_content")
"""Values of `gen_ai.operation.name` of calls of a model."""
WRAPPERS = frozenset(words("message tool_call message_content"))
"""Parts of the names of OpenInference's attributes that say what their number stands for."""
QUESTIONS = tuple(name for name in PROMPTS if name not in ("input", "inputs", "request", "raw"))
NAMED = re.compile(
    rf"(?!ref|gold|human|user)\w*({MODELS}|model|assistant|bot|llm)[\w.-]*_(response|completion|output|answer|generation)s?",
    re.IGNORECASE,
)
"""Names of fields with the answer of a model that they name."""
BFCL_ID = re.compile(r"[a-z_]+_\d[\d-]*")

NOT_A_MODEL = "a step of a trace that is not a call of a model"
OTHER_BRANCH = "an answer in a branch of a conversation that was left"


def span(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a span of a trace that is a call of a model."""
    fields = record.get("attributes", record)
    if isinstance(fields, list):  # OTLP
        pairs = [pair for pair in fields if isinstance(pair, dict) and isinstance(pair.get("value"), dict)]
        fields = {str(pair.get("key")): next(iter(pair["value"].values()), None) for pair in pairs}
    if not isinstance(fields, dict):
        return None
    kind = str(fields.get("openinference.span.kind", record.get("span_kind", ""))).lower()
    operation, identity = fields.get("gen_ai.operation.name", "chat"), str(fields.get("ai.operationId", ".doStream"))
    if kind in STEPS or operation not in OPERATIONS or not identity.endswith((".doGenerate", ".doStream")):
        skipped.append(NOT_A_MODEL)
        return []
    text = next((fields[name] for name in ("ai.response.text", "ai.response.object") if fields.get(name)), "")
    if calls := parsed(fields.get("ai.response.toolCalls")):
        text = {"role": ASSISTANT, "content": text, "tool_calls": calls}
    before: object = parsed(fields.get("gen_ai.input.messages", fields.get("ai.prompt.messages")))
    after = parsed(fields.get("gen_ai.output.messages")) or _attributes(fields, "llm.output_messages") or text
    if not after:
        return [] if kind == "llm" or "gen_ai.operation.name" in fields else None
    return exchange(before or _attributes(fields, "llm.input_messages"), after, skipped)


def _attributes(fields: Value, prefix: str) -> object:
    """Return the list whose elements have attributes of their own, such as "PREFIX.0.message.content"."""
    nested: Value = {}
    for name in (name for name in fields if name.startswith(f"{prefix}.")):
        path = [
            part for part in name[len(prefix) + 1 :].replace("contents", "content").split(".") if part not in WRAPPERS
        ]
        inner: Any = nested
        for part in path[:-1]:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else {}
        if path and isinstance(inner, dict):
            inner[path[-1]] = fields[name]
    return _lists(nested) or fields.get(prefix)


def _lists(tree: object) -> object:
    """Return a tree in which objects with numbers as names are lists."""
    if not isinstance(tree, dict):
        return tree
    if all(name.isdecimal() for name in tree):
        return [_lists(tree[name]) for name in sorted(tree, key=int)]
    return {name: _lists(value) for name, value in tree.items()}


def tree(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read the messages from the current node of a tree to its root; without such a node, from the last one."""
    nodes = record["mapping"]
    if not isinstance(nodes, dict) or not all(isinstance(node, dict) and "message" in node for node in nodes.values()):
        return None
    name = record.get("current_node", next(reversed(nodes), None))
    path: dict[str, Value] = {}
    while isinstance(name, str) and name in nodes and name not in path:
        path[name] = nodes[name]
        name = nodes[name].get("parent")
    messages = [node["message"] for node in reversed(path.values()) if isinstance(node["message"], dict)]
    left = [node["message"] for name, node in nodes.items() if name not in path]
    skipped += [OTHER_BRANCH for message in left if chats.role_of(message) == ASSISTANT]
    return conversation(messages, record, skipped) if messages else []


def function_calls(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read the result of a task of BFCL: a text, or the calls and texts of each step of each turn."""
    if not isinstance(record["id"], str) or not BFCL_ID.fullmatch(record["id"]):
        return None
    found: list[Found] = []
    steps = [record["result"]]
    while steps:
        step = steps.pop(0)
        if isinstance(step, list) and step and all(isinstance(call, dict) and len(call) == 1 for call in step):
            calls = [{"name": name, "arguments": arguments} for call in step for name, arguments in call.items()]
            step = {"role": ASSISTANT, "content": None, "tool_calls": calls}
        elif isinstance(step, list):
            steps[:0] = step
        found += [] if isinstance(step, list) else [Found(output) for output in outputs_of(step, skipped)]
    return found


def samples(record: Value, _: list[str]) -> list[Found] | None:
    """Read samples of a model: texts, or objects with an output."""
    written = record["samples"] if isinstance(record["samples"], list) else []
    texts = [one.get("output") if isinstance(one, dict) and "messages" not in one else one for one in written]
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    return [Found(text, prompt_of(record)) for text in texts if text]


def named_answers(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read the answers to a question in fields with the names of models, such as "chatgpt_response"."""
    names = [name for name in record if NAMED.fullmatch(name)]
    prompt = prompt_of({name: record[name] for name in QUESTIONS if name in record})
    return [Found(output, prompt) for name in names for output in outputs_of(record[name], skipped)] or None
