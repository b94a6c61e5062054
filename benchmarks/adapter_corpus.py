"""Compare corpora for the drafts of a new LoRA adapter's requests: its own, that of the base model, or both in one.

    python -m benchmarks.adapter_corpus --trace ADAPTER.npz [--base BASE.npz] [--cost 0.02] [--tokens 65536]

The base model's corpus is filled with its traffic, and the adapter's requests arrive one at a time. With `own`, their
drafts come from earlier ones of the same adapter; with `base`, from the base model's traffic, and nothing is added to
it; with `both`, from a corpus with all of it. Without --base, the base model's traffic is the half of the trace with
other tasks (its field `group`).

The output has S, as defined in `benchmarks.replay`, by the number of output tokens that the adapter has produced
before, then S of all tokens if drafts come from `base` until the adapter has T output tokens and from `own` afterwards.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.contestants import Remembering, Running
from benchmarks.replay import share
from benchmarks.rounds import replay
from benchmarks.traces import Request, Trace, load_trace

BASE_TOKENS = 200_000
"""Output tokens of the base model's traffic."""
FIRST_WINDOW = 1024
"""Output tokens of the first window; each further one ends at twice the number of tokens."""
KINDS = ("own", "base", "both")


class Counts(NamedTuple):
    """Sums over the steps of a window."""

    tokens: int
    steps: int
    drafted: int

    def speed(self, cost: float) -> float:
        """Return S."""
        return round(self.tokens / (self.steps + cost * self.drafted), 4)


class Switched(Remembering):
    """A drafter that learns finished requests only while `learns` is set."""

    learns = True

    def finish(self, sequence: Running) -> None:
        """End a request."""
        self._own.finish(sequence.index, sequence.last, verified=sequence.verified, learn=self.learns)


def split(path: Path) -> tuple[Trace, Trace]:
    """Divide the requests of a trace by task: those of tasks with an even number, and the others."""
    with np.load(path) as file:
        groups = file["group"][file["output_len"] > 0].tolist()
    trace = load_trace(path)
    halves: tuple[list[Request], list[Request]] = ([], [])
    for group, request in zip(groups, trace.requests, strict=True):
        halves[group % 2].append(request)
    return Trace(trace.name, halves[0]), Trace(trace.name, halves[1])


def windows(trace: Trace) -> Iterator[tuple[int, Trace]]:
    """Yield consecutive parts of a trace, each with the number of output tokens up to its end."""
    end, total, requests = FIRST_WINDOW, 0, list[Request]()
    for request in trace.requests:
        requests.append(request)
        total += len(request.output)
        if total >= end:
            yield total, Trace(trace.name, requests)
            requests, end = [], 2 * end
    if requests:
        yield total, Trace(trace.name, requests)


def measure(kind: str, base: Trace, own: Trace, cost: float) -> dict[int, Counts]:
    """Return the sums of each window, by its end."""
    config = {"draft_shape": "path", "max_draft": 32, "cost": cost}
    drafter = Switched(Trace(own.name, base.requests + own.requests), config, sessions=False)
    if kind != "own":
        replay(drafter, base)
    drafter.learns = kind != "base"
    tallies = {end: replay(drafter, part) for end, part in windows(own)}
    return {end: Counts(tally.output_tokens, tally.steps, tally.drafted) for end, tally in tallies.items()}


def switched(found: dict[str, dict[int, Counts]], until: int) -> Counts:
    """Return the sums of all windows, those up to `until` tokens with drafts from `base` and the others from `own`."""
    ends = found["own"]
    parts = [found["base" if end <= until else "own"][end] for end in ends]
    return Counts(*(sum(column) for column in zip(*parts, strict=True)))


def main() -> None:
    """Replay the adapter's requests with each kind of corpus and print S."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adapter_corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="PATH", help="the adapter's traffic, .npz")
    parser.add_argument(
        "--base", type=Path, metavar="PATH", help="the base model's traffic, .npz, of the same vocabulary"
    )
    parser.add_argument(
        "--cost", type=share, default=0.02, help="cost of one more token as a fraction of a step (0.02)"
    )
    parser.add_argument("--tokens", type=int, default=65_536, help="output tokens of the adapter (65536)")
    arguments = parser.parse_args()
    base, own = split(arguments.trace)
    if arguments.base is not None:
        base = load_trace(arguments.base)
    base, own, cost = base.first(BASE_TOKENS), own.first(arguments.tokens), arguments.cost
    found = {kind: measure(kind, base, own, cost) for kind in KINDS}
    by_window = {end: {kind: found[kind][end].speed(cost) for kind in KINDS} for end in found["own"]}
    for end, speeds in by_window.items():
        print(f"up to {end:6d} tokens  " + "  ".join(f"{kind} {speed:.3f}" for kind, speed in speeds.items()))
    by_limit = {until: switched(found, until).speed(cost) for until in (0, *by_window)}
    for until, speed in by_limit.items():
        print(f"base up to T = {until:6d}  {speed:.3f}")
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    print(json.dumps({"windows": by_window, "limits": by_limit, "settings": settings}))


if __name__ == "__main__":
    main()
