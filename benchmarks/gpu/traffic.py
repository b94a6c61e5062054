"""Recorded traffic: requests to serve, and earlier ones for the drafter to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.figures import SkippedError
from benchmarks.gpu.requests import Item, Limits, is_renumbered, replay_items
from ssd.replay import Recording
from ssd.types import Drafter

WARM_UP_TOKENS = 8
FIRST_LEARNED_ID = 1 << 32
"""First id of the requests that are only passed to the drafter; an engine's ids start at 0."""


@dataclass(frozen=True)
class Traffic:
    """Requests in the vocabulary of the model."""

    learned: list[Item]
    served: list[Item]
    notes: dict[str, object]
    """Facts about the requests, for the results."""


def shortened(items: Sequence[Item]) -> list[Item]:
    """Return the same requests, with outputs of a few tokens."""
    return [
        replace(item, request=replace(item.request, sampling=replace(item.request.sampling, max_tokens=most)))
        for item in items
        if (most := min(WARM_UP_TOKENS, item.request.sampling.max_tokens))
    ]


def traffic(bench: Bench, count: int, concurrent: int) -> Traffic:
    """Return `count` requests of the trace to be served. Raises SkippedError without a trace.

    concurrent: number of requests that run at once, summed over the rounds. With fewer than two conversations for each
    of them, turns do not wait for earlier ones, because that would lower the concurrency.
    """
    trace = read_trace(bench)
    cap = bench.scale.prompt_tokens
    short = np.flatnonzero(trace.prompt_lengths <= cap)
    learned = min(bench.scale.learned, len(short) // 2)
    chosen = trace.take(short[: learned + count])
    if len(chosen) <= learned:
        raise SkippedError(f"the trace {trace.name} has no requests with prompts of at most {cap} tokens")
    limits = Limits(cap, bench.scale.output_tokens)
    items = replay_items(chosen, len(chosen), limits, bench.config)
    served = items[learned:]
    sessions = len({item.session for item in served})
    if apart := sessions < 2 * concurrent:
        served = [replace(item, session=number) for number, item in enumerate(served)]
    notes: dict[str, object] = {
        "trace": trace.name,
        "requests": len(served),
        "output_tokens": sum(item.request.sampling.max_tokens for item in served),
        "seen_before": learned,
        "renumbered": is_renumbered(chosen, len(chosen), limits, bench.config),
        "turns_wait_for_each_other": not apart,
    }
    return Traffic(items[:learned], served, notes)


def read_trace(bench: Bench) -> Recording:
    """Read the recorded traffic. Raises SkippedError if there is none."""
    path = bench.setting.trace
    if path is None or not path.exists():
        raise SkippedError(f"no recorded traffic at {path}; give --trace FILE.npz" if path else "no --trace was given")
    try:
        return Recording.load(path)
    except ValueError as error:
        raise SkippedError(str(error)) from None


def warm_up(drafter: Drafter, learned: list[Item]) -> None:
    """Pass requests to a drafter for learning, as if they had been served."""
    for number, item in enumerate(learned, FIRST_LEARNED_ID):
        assert item.request.recorded is not None
        drafter.start(number, item.request.prompt)
        drafter.finish(number, item.request.recorded)
