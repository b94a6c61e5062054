"""Workloads of the demonstration, like those of a service, and where their outputs end."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from engine.engine import Engine
from engine.models.tokenizer import ChatPrompts, Detokenizer, Tokenizer
from engine.scheduling.request import Request
from ssd.errors import UserError

Kind = Literal["new", "near repeat", "exact repeat"]
KINDS: tuple[Kind, ...] = get_args(Kind)

EXACT_SHARE = 0.3
NEAR_SHARE = 0.3

EDITS = (
    "# Copyright of the authors; see the file LICENSE.",
    "# Reviewed, no change in behavior.",
    "# TODO: simplify once the old interface is gone.",
    "# -*- coding: utf-8 -*-",
    "# This part is covered by the tests of the package.",
    "# Moved here from another module.",
)
"""Possible first lines of an edited beginning."""
TASKS_FILE = Path(__file__).with_name("tasks.jsonl")
"""A conversation per line: the kind of its tasks, and messages of user and assistant in turn."""
ROLES = ("user", "assistant")
MAX_LINE = 100
"""Characters; few lines of the standard library are longer."""
DEFINITION = re.compile(r"^([ \t]*)(?:async )?def ", re.MULTILINE)


@dataclass(frozen=True)
class WorkItem:
    """One request of the workload."""

    kind: Kind
    prompt: str
    seed: int
    """Seed for sampling, different for all new requests; a repeat has the seed of the original."""
    task: str = ""
    """Kind of a chat's task, see `make_tasks`; empty for a function to complete."""


def make_workload(prompts: Sequence[str], count: int, seed: int) -> list[WorkItem]:
    """Return `count` requests in a random order: new ones, exact repeats, and repeats with an edited beginning.

    Originals of repeats are sampled by Zipf's law: a few requests recur often, many never. In the shuffled order the
    first occurrence of a prompt is the new one, so the share of repeats grows during the workload. Raises UserError if
    there are too few prompts.
    """
    rng = random.Random(seed)
    exact = round(EXACT_SHARE * count)
    near = min(round(NEAR_SHARE * count), count - exact - 1)  # At least one request is new.
    new = count - exact - near
    if new > len(prompts):
        raise UserError(f"{count} requests need {new} prompts; the file has {len(prompts)}; run fewer requests")
    originals = [WorkItem("new", prompt, seed) for seed, prompt in enumerate(rng.sample(list(prompts), new))]
    shares: dict[Kind, int] = {"exact repeat": exact, "near repeat": near}
    repeats = [kind for kind, share in shares.items() for _ in range(share)]
    rng.shuffle(repeats)
    popularity = [1 / rank for rank in range(1, new + 1)]
    order = [*range(new), *rng.choices(range(new), popularity, k=len(repeats))]
    rng.shuffle(order)
    seen: set[int] = set()
    items = []
    for number in order:
        items.append(originals[number] if number not in seen else _repeat(originals[number], repeats.pop(), rng))
        seen.add(number)
    return items


def _repeat(original: WorkItem, kind: Kind, rng: random.Random) -> WorkItem:
    prompt = edit_beginning(original.prompt, rng) if kind == "near repeat" else original.prompt
    return replace(original, kind=kind, prompt=prompt)


def edit_beginning(prompt: str, rng: random.Random) -> str:
    """Return `prompt` with a new first line, which replaces up to a third of its lines or none."""
    lines = prompt.splitlines(keepends=True)
    dropped = rng.randint(0, len(lines) // 3)
    edits = [edit for edit in EDITS if edit not in prompt]
    return rng.choice(edits) + "\n" + "".join(lines[dropped:])


def make_tasks(chat: ChatPrompts, seed: int) -> list[WorkItem]:
    """Return a task for each message of a user, for a chat model: to answer it, given the messages before it.

    The answers repeat parts of what the model is given, as much of real traffic does. Conversations are mixed at
    random; the tasks of a conversation stay in order. Raises UserError for a model without chat template.
    """
    rng = random.Random(seed)
    waiting = []
    for each in map(json.loads, TASKS_FILE.read_text(encoding="utf-8").splitlines()):
        messages = [{"role": ROLES[at % 2], "content": text} for at, text in enumerate(each["messages"])]
        waiting.append([(each["kind"], chat.text(messages[:end])) for end in range(1, len(messages) + 1, 2)])
    tasks: list[WorkItem] = []
    while waiting := [prompts for prompts in waiting if prompts]:
        kind, prompt = rng.choice(waiting).pop(0)
        tasks.append(WorkItem("new", prompt, seed=len(tasks), task=kind))
    return tasks


# --- Ends of outputs


def end_of_block(prompt: str, text: str) -> int | None:
    """Return the number of leading characters of `text` that belong to the output; None if it has not ended.

    Greedy decoding of a small model soon repeats itself, and a loop is trivial to draft, so outputs end where a
    programmer would stop reading. `text` continues `prompt`, which ends within a function. The output ends with the
    function, that is before a line that is not indented deeper than the function's `def`; before a line that the output
    already has; and after `MAX_LINE` characters of one line. Prompts without a `def` have no function to end.
    """
    definitions = DEFINITION.findall(prompt)
    indentation = len(definitions[-1]) if definitions else -1
    lines = text.split("\n")
    earlier: set[str] = set()
    position = 0
    for number, line in enumerate(lines):
        if line.strip():
            is_complete = number < len(lines) - 1
            if len(line) - len(line.lstrip()) <= indentation or (is_complete and line in earlier):
                return position
            if len(line) > MAX_LINE:
                return position + MAX_LINE
            earlier.add(line)
        position += len(line) + 1
    return None


def find_lengths(
    engine: Engine, tokenizer: Tokenizer, requests: Sequence[Request], prompts: Sequence[str]
) -> list[int]:
    """Return the number of tokens after which each request's output ends, at most its `max_tokens` and at least 1.

    prompts: the text of each request's prompt. The outputs do not depend on the engine's drafter or batch.
    """
    places = {engine.add(request): place for place, request in enumerate(requests)}
    streams = [Detokenizer(tokenizer.decode, request.prompt) for request in requests]
    texts = [""] * len(requests)
    sizes: list[list[int]] = [[] for _ in requests]
    """Length of each text after each of its tokens, up to its end."""
    while engine.scheduler.has_work:
        report = engine.step()
        for sequence_id, tokens in report.tokens.items():
            place = places[sequence_id]
            for token in tokens.tolist():
                texts[place] += streams[place].feed(token)
                sizes[place].append(len(texts[place]))
            if (end := end_of_block(prompts[place], texts[place])) is not None:
                del sizes[place][int(np.searchsorted(sizes[place], end)) + 1 :]
                engine.cancel(sequence_id)
    return [max(1, len(each)) for each in sizes]
