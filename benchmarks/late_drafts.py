"""Measure the share of accepted tokens that remains when drafts are made while a step is in flight.

    python -m benchmarks.late_drafts TRACE.npz ...

Replays recorded outputs without a model, one request at a time. `waiting`: each draft is made after the results of the
previous step are known. `path`: it is made one step earlier, as a longer path, which matches one outcome of the step in
flight. `tree of n`: the branches of a draft tree give drafts for up to n outcomes. The engine uses `path`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ssd
from benchmarks.traces import Request, load_trace
from ssd.config import MAX_DRAFT, DrafterConfig
from ssd.types import ROOT, DraftBatch, Progress

DRAFT = 16
"""Largest number of draft tokens of a step."""
COST = 0.02
"""Cost of a draft token, as a fraction of a step."""
TREE_COST = COST / 4
"""Cost for trees, lower because several outcomes share their nodes."""

Outcome = tuple[int, int]
"""Number of accepted draft tokens, bonus token."""


class Mode(NamedTuple):
    """How drafts are made."""

    name: str
    shape: str
    outcomes: int
    """Largest number of outcomes that have a draft; 0: drafts are made after the outcome is known."""


MODES = (
    Mode("waiting", "path", 0),
    Mode("path", "path", 1),
    Mode("tree of 4", "tree", 4),
    Mode("tree of 16", "tree", 16),
)


class Counts:
    """Steps, produced tokens and draft tokens."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.drafted = 0

    @property
    def accepted_per_step(self) -> float:
        """Mean number of accepted draft tokens."""
        return self.tokens / self.steps - 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each trace, then one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=6000, help="output tokens of each trace (6000)")
    options = parser.parse_args(arguments)
    rows = []
    for path in options.traces:
        trace = load_trace(path)
        tallies = {mode.name: replay(trace.requests, mode, options.tokens) for mode in MODES}
        waiting = tallies["waiting"].accepted_per_step
        row: dict[str, object] = {"trace": trace.name}
        for name, tally in tallies.items():
            row[name] = {
                "tokens_per_step": round(tally.tokens / tally.steps, 3),
                "drafted_per_step": round(tally.drafted / tally.steps, 2),
                "accepted_kept": round(tally.accepted_per_step / waiting, 3) if waiting else None,
            }
        rows.append(row)
        kept = "  ".join(f"{name} {row[name]['accepted_kept']}" for name in tallies)  # type: ignore[index]
        print(f"{trace.name:28} {kept}")
    print(json.dumps({"results": rows}))


def replay(requests: Sequence[Request], mode: Mode, tokens: int) -> Counts:
    """Replay requests one after the other until `tokens` tokens are produced."""
    cost = TREE_COST if mode.shape == "tree" else COST
    drafter = ssd.SuffixDrafter(DrafterConfig(capacity=1_000_000, max_draft=MAX_DRAFT, draft_shape=mode.shape))
    tally = Counts()
    for number, request in enumerate(requests):
        if tally.tokens >= tokens:
            break
        replay_one(drafter, number, request, mode, cost, tally)
    drafter.close()
    return tally


def replay_one(
    drafter: ssd.SuffixDrafter, number: int, request: Request, mode: Mode, cost: float, tally: Counts
) -> None:
    """Replay one request and add its counts to `tally`."""
    output, done, sent, verified = request.output.tolist(), 0, 0, 0
    drafter.start(number, request.prompt)
    draft: list[int] = []
    limit = DRAFT if mode.outcomes == 0 else MAX_DRAFT
    offered: list[int] = []
    while done < len(output):
        new, sent = output[sent:done], done
        progress = Progress.of_one(number, np.array(new, np.uint32), verified=verified, max_draft=limit)
        batch = drafter.draft(replace(progress, cost=cost))
        if mode.outcomes == 0:
            draft = batch.tokens.tolist()
        table = outcomes_of(batch, draft, mode.outcomes) if mode.outcomes else {}
        accepted = shared(draft, output[done:-1])
        bonus = output[done + accepted]
        tally.steps, tally.tokens, tally.drafted = (
            tally.steps + 1,
            tally.tokens + accepted + 1,
            tally.drafted + len(draft),
        )
        done += accepted + 1
        offered = batch.tokens.tolist()
        correct = shared(offered, output[sent:done])
        # A path is verified up to its first wrong token.
        verified = min(len(offered), done - sent, correct + 1) if mode.shape == "path" else len(offered)
        draft = table.get((accepted, bonus), [])
    drafter.finish(number, np.array(output[sent:], np.uint32), verified=verified)


def outcomes_of(batch: DraftBatch, draft: list[int], count: int) -> dict[Outcome, list[int]]:
    """Return drafts for the `count` most likely outcomes of verifying `draft`, from a tree after the same text."""
    tokens, parents, probabilities = batch.tokens.tolist(), batch.parents.tolist(), batch.accept_prob.tolist()
    children: dict[int, list[int]] = {}
    path_prob = [0.0] * len(tokens)
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
        path_prob[node] = probabilities[node] * (1.0 if parent == ROOT else path_prob[parent])
    found: list[tuple[float, Outcome, int]] = []
    at, depth = ROOT, 0
    while True:
        wanted = draft[depth] if depth < len(draft) else None
        found += [
            (path_prob[node], (depth, tokens[node]), node) for node in children.get(at, ()) if tokens[node] != wanted
        ]
        following = [node for node in children.get(at, ()) if tokens[node] == wanted]
        if wanted is None or not following:
            break
        at, depth = following[0], depth + 1
    found.sort(key=lambda entry: -entry[0])
    best: Callable[[int], float] = path_prob.__getitem__
    table = {}
    for _, outcome, node in found[:count]:
        path: list[int] = []
        while node in children and len(path) < DRAFT:
            node = max(children[node], key=best)
            path.append(tokens[node])
        table[outcome] = path
    return table


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of leading tokens that two texts share."""
    size = min(len(left), len(right))
    return next((place for place in range(size) if left[place] != right[place]), size)


if __name__ == "__main__":
    main()
