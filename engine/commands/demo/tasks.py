"""Tasks for a chat model, whose answers repeat parts of what it is given, as much of real traffic does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from engine.commands.demo.workload import WorkItem
from engine.models.tokenizer import ChatPrompts

TASKS_FILE = Path(__file__).with_name("tasks.jsonl")
"""A conversation per line: the kind of its tasks, and messages of user and assistant in turn."""
ROLES = ("user", "assistant")


def make_tasks(chat: ChatPrompts, seed: int) -> list[WorkItem]:
    """Return a task for each message of a user: to answer it, given the messages before it.

    Conversations are mixed at random; the tasks of a conversation stay in order. Raises UserError for a model without
    chat template.
    """
    rng = random.Random(seed)
    waiting = [_prompts(chat, json.loads(line)) for line in TASKS_FILE.read_text(encoding="utf-8").splitlines()]
    tasks: list[WorkItem] = []
    while waiting := [prompts for prompts in waiting if prompts]:
        kind, prompt = rng.choice(waiting).pop(0)
        tasks.append(WorkItem("new", prompt, seed=len(tasks), task=kind))
    return tasks


def _prompts(chat: ChatPrompts, conversation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the kind and the prompt of each task of a conversation."""
    messages = [{"role": ROLES[at % 2], "content": text} for at, text in enumerate(conversation["messages"])]
    return [(conversation["kind"], chat.text(messages[:end])) for end in range(1, len(messages) + 1, 2)]
