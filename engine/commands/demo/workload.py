"""A workload like a service's: new requests, exact repeats, and repeats whose beginning was edited."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from ssd.errors import UserError

Kind = Literal["new", "near repeat", "exact repeat"]
KINDS: tuple[Kind, ...] = get_args(Kind)

EXACT_SHARE = 0.3
NEAR_SHARE = 0.3

EDITS = (
    "# Copyright of the authors; see the file LICENSE.",
    "# Reviewed, no change in behaviour.",
    "# TODO: simplify once the old interface is gone.",
    "# -*- coding: utf-8 -*-",
    "# This part is covered by the tests of the package.",
    "# Moved here from another module.",
)
"""Lines that an edited beginning may get."""


@dataclass(frozen=True)
class WorkItem:
    """One request of the workload."""

    kind: Kind
    prompt: str
    source: str
    """Where the prompt came from."""
    seed: int
    """What its sampling draws with; a repeat has the seed of what it repeats."""


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(source, prompt) of every line of a prompts file. Raises UserError if it cannot be used."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        prompts = [(line["source"], line["prompt"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{path} is no file of prompts ({problem})") from None
    if not all(isinstance(prompt, str) and prompt.strip() for _, prompt in prompts):
        raise UserError(f"{path} is no file of prompts (one is empty or no text)")
    return prompts


def make_workload(prompts: Sequence[tuple[str, str]], count: int, seed: int) -> list[WorkItem]:
    """`count` requests in a random order: the shares above are repeats, the rest new.

    What is repeated is drawn by Zipf's law: a few requests recur often, many never. In the shuffled order the first of
    a kin is the new one, so the longer the workload runs, the more of it has been seen before.
    Raises UserError if there are too few prompts.
    """
    rng = random.Random(seed)
    exact = round(EXACT_SHARE * count)
    near = min(round(NEAR_SHARE * count), count - exact - 1)  # A few requests are not all repeats.
    new = count - exact - near
    if new > len(prompts):
        raise UserError(f"{count} requests need {new} prompts; the file has {len(prompts)}")
    originals = [
        WorkItem("new", prompt, source, seed=number)
        for number, (source, prompt) in enumerate(rng.sample(list(prompts), new))
    ]
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
    """`prompt` with a new first line, in place of up to a third of its lines or before them."""
    lines = prompt.splitlines(keepends=True)
    dropped = rng.randint(0, len(lines) // 3)
    edits = [edit for edit in EDITS if edit not in prompt]
    return rng.choice(edits) + "\n" + "".join(lines[dropped:])
