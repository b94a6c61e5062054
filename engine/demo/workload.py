"""A workload like a service's: new requests, exact repeats, and repeats whose beginning was edited."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssd.errors import UserError

Kind = Literal["new", "exact repeat", "near repeat"]

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


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(source, prompt) of every line of a prompts file. Raises UserError if it cannot be used."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(line["source"], line["prompt"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{path} is no file of prompts ({problem}); install the package again") from None


def make_workload(prompts: Sequence[tuple[str, str]], count: int, seed: int) -> list[WorkItem]:
    """`count` requests in a random order: the shares above are repeats, the rest new. A repeat follows what it repeats.

    Raises UserError if there are too few prompts.
    """
    rng = random.Random(seed)
    exact, near = round(EXACT_SHARE * count), round(NEAR_SHARE * count)
    shares: dict[Kind, int] = {"exact repeat": exact, "near repeat": near, "new": count - exact - near}
    kinds = [kind for kind, share in shares.items() for _ in range(share)]
    rng.shuffle(kinds)
    # There is nothing to repeat before the first new request.
    first = kinds.index("new")
    kinds[0], kinds[first] = kinds[first], kinds[0]
    if kinds.count("new") > len(prompts):
        raise UserError(f"{count} requests need {kinds.count('new')} prompts; the file has {len(prompts)}")
    fresh = iter(rng.sample(list(prompts), kinds.count("new")))
    seen: list[tuple[str, str]] = []
    items = []
    for kind in kinds:
        if kind == "new":
            source, prompt = next(fresh)
            seen.append((source, prompt))
        else:
            source, prompt = rng.choice(seen)
            if kind == "near repeat":
                prompt = edit_beginning(prompt, rng)
        items.append(WorkItem(kind, prompt, source))
    return items


def edit_beginning(prompt: str, rng: random.Random) -> str:
    """`prompt` with up to a third of its first lines replaced by another one."""
    lines = prompt.splitlines(keepends=True)
    dropped = rng.randint(0, len(lines) // 3)
    return rng.choice(EDITS) + "\n" + "".join(lines[dropped:])
