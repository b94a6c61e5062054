"""Read conversations from the files that public repositories hold: one function for each source.

A function takes the contents of the source's files, by path in the order of the manifest, and yields conversations.
"""

from __future__ import annotations

import ast
import json
import re
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
CODE_FORMATS = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample"
    " inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the"
    " inputs, runs the algorithm and writes output to STDOUT.",
    "You will use the following starter code to write the solution to the problem and enclose your code within"
    " delimiters.",
)
"""LiveCodeBench's instructions for problems without and with starter code."""


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


def reflexion_react(files: Mapping[str, str]) -> Iterator[Conversation]:
    """Yield the trials of Reflexion's ReAct agent; the files are the log, the prompts and the examples in them.

    Thought and action of a step are one output. A question that was answered right is not tried again, but every later
    trial lists it.
    """
    log, prompts, shots = files.values()
    instruction, _, _ = _string_constant(prompts, "REACT_INSTRUCTION").partition("\nQuestion:")
    system = Message("system", instruction.format(examples=_string_constant(shots, "WEBTHINK_SIMPLE6")))
    answered: set[str] = set()
    for number, trial in enumerate(log.split("\nBEGIN TRIAL ")[1:]):
        before = frozenset(answered)
        for entry in re.split(r"\n\n(?=Question: )", trial)[1:]:
            question, *steps = re.split(r"\n(?=(?:Thought|Observation) \d+:)", entry.partition("\nCorrect answer:")[0])
            task = question.partition("You have attempted")[0].partition("\n")[0].strip()
            if task in before:
                continue
            if steps[-1].endswith(": Answer is CORRECT"):
                answered.add(task)
            messages = [Message(ASSISTANT if step.startswith("Thought") else "user", step) for step in steps]
            yield Conversation([system, Message("user", question), *messages], task, number)


def livecodebench(files: Mapping[str, str]) -> Iterator[Conversation]:
    """Yield the answers to LiveCodeBench's problems, with its prompts."""
    (text,) = files.values()
    for record in json.loads(text):
        starter = record["starter_code"]
        prompt = (
            f"### Question:\n{record['question_content']}\n\n### Format: {CODE_FORMATS[bool(starter)]}\n"
            f"```python\n{starter or '# YOUR CODE HERE'}\n```\n\n"
            "### Answer: (use the provided format with backticks)\n\n"
        )
        for output in record["output_list"]:
            yield Conversation([Message("user", prompt), Message(ASSISTANT, output)], record["question_id"])


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
    "livecodebench": livecodebench,
    "mint": mint,
    "reasoning-gym": reasoning_gym,
    "reflexion-react": reflexion_react,
    "tau-bench": tau_bench,
    "tree-of-thought": tree_of_thought,
    "zero-eval": zero_eval,
}
"""Function of each format that a manifest may name."""
