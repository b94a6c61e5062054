"""Read conversations from the files that public repositories hold: one function for each source.

A function takes the contents of the source's files, by path in the order of the manifest, and yields conversations.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

ASSISTANT = "assistant"
RENDERED = "rendered"
"""Role of a prompt that is text with special tokens already."""

SQL_OBSERVATION = 1_000
"""Number of characters of a query's result that the model is shown."""
SQL_SYSTEM = (
    "You are a helpful assistant that writes MySQL queries. You interact with a MySQL database through a terminal-like"
    " environment: every query you write is executed and its output and a reward are shown to you. Use SHOW TABLES and"
    " DESC to learn the schema. Answer with one query in a ```SQL block."
)


class Message(NamedTuple):
    """A message of a conversation."""

    role: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """Messages in order; each message of the assistant is the output of one request."""

    messages: list[Message]
    task: str
    """Several samples of one task have the same value."""
    stage: int = 0
    """Conversations of a later stage arrive after all of the earlier ones."""


Format = Callable[[Mapping[str, str]], Iterator[Conversation]]


def tau_bench(files: Mapping[str, str]) -> Iterator[Conversation]:
    """Yield the conversations of tau-bench's airline agent; the first file has them, the others have the tools."""
    trajectories, *tools = files.values()
    schemas = "\n".join(json.dumps(_tool_schema(source), ensure_ascii=False) for source in tools)
    for trajectory in json.loads(trajectories):
        system, *rest = trajectory["traj"]
        messages = [Message("system", f"{system['content']}\n\n# Tools\n\n{schemas}")]
        messages += [Message(message["role"], _with_calls(message)) for message in rest]
        yield Conversation(messages, str(trajectory["task_id"]))


def _tool_schema(source: str) -> dict[str, Any]:
    """Return the literal that a tool's method `get_info` returns. The file is parsed, not executed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "get_info":
            returned = next(child for child in ast.walk(node) if isinstance(child, ast.Return))
            assert returned.value is not None
            return ast.literal_eval(returned.value)
    raise ValueError("a file of a tool has no method get_info")


def _with_calls(message: Mapping[str, Any]) -> str:
    """Return the text of a message and its tool calls as blocks."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        name, arguments = json.dumps(call["function"]["name"]), call["function"]["arguments"]
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def mint(files: Mapping[str, str]) -> Iterator[Conversation]:
    """Yield the conversations of MINT's agents; the label that starts an output is removed."""
    for path, text in files.items():
        for record in _json_lines(text):
            messages = []
            for role, content in ((entry["role"], entry["content"]) for entry in record["state"]["history"]):
                own = content.removeprefix("Assistant:\n") if role == ASSISTANT else content
                messages.append(Message(role, own))
            yield Conversation(messages, f"{path}:{record['task']['task_id']}")


def intercode_sql(files: Mapping[str, str]) -> Iterator[Conversation]:
    """Yield the conversations of InterCode's SQL agent, which sees the result and the reward of each query."""
    (text,) = files.values()
    for record in json.loads(text).values():
        question = f'Query: "{record["query"]}".\nYour response must only contain the SQL query'
        messages = [Message("system", SQL_SYSTEM), Message("user", question)]
        history = record["turn_history"]
        for action, seen, reward in zip(history["actions"], history["observations"], history["rewards"], strict=True):
            messages.append(Message(ASSISTANT, action))
            messages.append(Message("user", f"Output: {str(seen)[:SQL_OBSERVATION]}\nReward: {reward}"))
        yield Conversation(messages[:-1], record["query"])


def reasoning_gym(files: Mapping[str, str]) -> Iterator[Conversation]:
    """Yield the samples of reasoning-gym's checkpoints; the first file has the system prompt."""
    first, *results = files.items()
    system = Message("system", json.loads(first[1])["system_prompt"])
    for path, text in results:
        stage = int(path.split("step_")[1].split("/")[0])
        for category in json.loads(text)["categories"]:
            for question in (entry for dataset in category["datasets"] for entry in dataset["results"]):
                prompt = [system, Message("user", question["question"])]
                for completion in question["completions"]:
                    output = Message(ASSISTANT, completion["full_model_response"])
                    yield Conversation([*prompt, output], question["question"], stage)


def zero_eval(files: Mapping[str, str]) -> Iterator[Conversation]:
    """Yield the answers of ZeroEval, whose prompts are rendered."""
    for text in files.values():
        for record in json.loads(text):
            messages = [Message(RENDERED, record["model_input"]), Message(ASSISTANT, record["output"][0])]
            yield Conversation(messages, record["session_id"])


def arena_hard(files: Mapping[str, str]) -> Iterator[Conversation]:
    """Yield the answers to Arena-Hard's prompts."""
    (text,) = files.values()
    for record in _json_lines(text):
        question, answer = record["messages"]
        messages = [Message("user", question["content"]), Message(ASSISTANT, answer["content"]["answer"])]
        yield Conversation(messages, record["uid"])


def tree_of_thought(files: Mapping[str, str]) -> Iterator[Conversation]:
    """Yield the samples of Tree of Thoughts' creative writing; the files are the samples, inputs and prompts."""
    samples, inputs, prompts = files.values()
    sentences = inputs.split("\n")
    prompt = _string_constant(prompts, "cot_prompt")
    for record in json.loads(samples):
        question = Message("user", prompt.format(input=sentences[record["idx"]]))
        for output in record["ys"]:
            yield Conversation([question, Message(ASSISTANT, output)], str(record["idx"]))


def _string_constant(source: str, name: str) -> str:
    """Return the string that a Python file assigns to a name. The file is parsed, not executed."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            return ast.literal_eval(node.value)
    raise ValueError(f"the file of prompts does not define {name}")


def _json_lines(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file; text inside them may have other line separators."""
    return (json.loads(line) for line in text.split("\n") if line.strip())


FORMATS: dict[str, Format] = {
    "arena-hard": arena_hard,
    "intercode-sql": intercode_sql,
    "mint": mint,
    "reasoning-gym": reasoning_gym,
    "tau-bench": tau_bench,
    "tree-of-thought": tree_of_thought,
    "zero-eval": zero_eval,
}
"""Function of each format that a manifest may name."""
