"""A workload like that of a service: new requests, exact repeats, and repeats with an edited beginning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

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


@dataclass(frozen=True)
class WorkItem:
    """One request of the workload."""

    kind: Kind
    prompt: str
    seed: int
    """Seed for sampling, different for all new requests; a repeat has the seed of the original."""
    task: str = ""
    """Kind of a chat's task, see `engine.commands.demo.tasks`; empty for a function to complete."""


def make_workload(prompts: Sequence[str], count: int, seed: int) -> list[WorkItem]:
    """Return `count` requests in a random order, with the shares of repeats above.

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


def most_requests(prompts: int) -> int:
    """Return the largest number of requests for which `prompts` prompts suffice."""
    return int(prompts / (1 - EXACT_SHARE - NEAR_SHARE) + 1e-9)


def _repeat(original: WorkItem, kind: Kind, rng: random.Random) -> WorkItem:
    prompt = edit_beginning(original.prompt, rng) if kind == "near repeat" else original.prompt
    return replace(original, kind=kind, prompt=prompt)


def edit_beginning(prompt: str, rng: random.Random) -> str:
    """Return `prompt` with a new first line, which replaces up to a third of its lines or none."""
    lines = prompt.splitlines(keepends=True)
    dropped = rng.randint(0, len(lines) // 3)
    edits = [edit for edit in EDITS if edit not in prompt]
    return rng.choice(edits) + "\n" + "".join(lines[dropped:])
