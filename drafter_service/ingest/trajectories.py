"""Readers of agents' trajectories: steps, events, trees of messages and branches of searches in one record."""

from __future__ import annotations

from drafter_service.ingest import chats, sessions
from drafter_service.ingest.answers import Found, conversation
from drafter_service.ingest.chats import ASSISTANT, TOOL, USER, as_json, chat_of
from drafter_service.ingest.readers import Value, messages, objects_in
from drafter_service.ingest.sessions import Record

OTHER_BRANCH = "an answer in a branch of a conversation that was left"


def steps(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a trajectory of SWE-agent: its history, and the responses that the history lacks."""
    turns = [
        {"role": role, "content": step[name]}
        for step in objects_in(record["trajectory"])
        for role, name in ((ASSISTANT, "response"), (USER, "observation"))
        if isinstance(step.get(name), str)
    ]
    if "history" not in record:
        return conversation(turns, record, skipped) or None
    found = messages(record, skipped)
    written = [turn["content"] for turn in turns if turn["role"] == ASSISTANT and turn["content"]]
    left = [text for text in written if text not in [one.output for one in found or ()]]
    # If few responses are in the history, it has them in another format.
    return found and found + [Found(text) for text in left if 2 * len(left) <= len(written)]


def atif(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read the steps of a trajectory in the format of Harbor."""
    turns: list[Value] = []
    for step in objects_in(record["steps"]):
        role = ASSISTANT if step.get("source") == "agent" else step.get("source")
        turns.append({**step, "role": role, "content": step.get("message"), "source": None})
        results = [result for one in objects_in([step.get("observation")]) for result in objects_in(one.get("results"))]
        turns += [{"role": TOOL, "content": results}] if results else []
    inner = [atif(one, skipped) or [] for one in objects_in(record.get("subagent_trajectories")) if "steps" in one]
    return sum(inner, conversation(turns, record, skipped) or []) or None


def events(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read the events of OpenHands, or, in older versions, pairs of an action and an observation."""
    history = record["history"] if isinstance(record["history"], list) else []
    events = [event for one in history for event in objects_in(one if isinstance(one, list) else [one])]
    if not any("action" in event or "observation" in event for event in events) or chat_of(events) is not None:
        return None
    session = sessions.Actions("", Record(record, ""))
    reads = [read for event in events for read in session.add(Record(event, ""))] + list(session.finish())
    skipped += [reason for read in reads for reason in read.skipped]
    return [found for read in reads for found in read.outputs]


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


def ai_studio(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a chat of Google's AI Studio, in which thoughts are chunks before that of the answer."""
    prompt, turns, thoughts = record["chunkedPrompt"], [], ""
    for chunk in objects_in(prompt.get("chunks") if isinstance(prompt, dict) else None):
        if chunk.get("isThought"):
            thoughts = chunk.get("text", "")
        else:
            turns.append({"role": chunk.get("role"), "content": chunk.get("text"), "reasoning": thoughts})
            thoughts = ""
    return conversation(turns, record, skipped) or []


def copilot(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a chat exported from VS Code: each answer to the user is the model's texts and calls of several rounds."""
    turns: list[Value] = []
    for request in objects_in(record["requests"]):
        asked, parts = request.get("message"), objects_in(request.get("response"))
        turns.append({"role": USER, "content": asked.get("text") if isinstance(asked, dict) else asked})
        metadata = request["result"].get("metadata") if isinstance(request.get("result"), dict) else None
        metadata = metadata if isinstance(metadata, dict) else {}
        rounds, results = objects_in(metadata.get("toolCallRounds")), metadata.get("toolCallResults")
        results = results if isinstance(results, dict) else {}
        if not rounds:  # Parts of other kinds are texts of the window.
            texts = [part["value"] for part in parts if "kind" not in part and isinstance(part.get("value"), str)]
            rounds = [{"response": "".join(texts)}]
        for one in rounds:
            calls = objects_in(one.get("toolCalls"))
            turns.append({"role": ASSISTANT, "content": one.get("response"), "tool_calls": calls})
            names = [str(call.get("id")) for call in calls]
            turns += [{"role": TOOL, "content": as_json(results[name])} for name in names if name in results]
    return conversation(turns, record, skipped) or []
