"""Replay a trace: draft for all running requests, then verify against the recorded outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from benchmarks.support.drafters import Contestant, Draft, Entry, Running
from benchmarks.support.scores import COLD_SHARE, Tally
from benchmarks.traces import Trace


class Arrivals:
    """Requests in arrival order; a turn waits for its session's previous turn while later requests may start."""

    def __init__(self, trace: Trace) -> None:
        self._waiting = list(enumerate(trace.requests, trace.first_index))

    def next(self, running: Sequence[Running]) -> Running | None:
        """Remove and return the first request whose session is not running; None if there is none."""
        busy = {sequence.request.session for sequence in running}
        for place, (index, request) in enumerate(self._waiting):
            if request.session not in busy:
                del self._waiting[place]
                return Running(index, request)
        return None


class Stopwatch:
    """Sums the seconds spent in its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._began


def replay(
    contestant: Contestant,
    trace: Trace,
    concurrency: int = 1,
    refresh_every: int | None = None,
    on_finish: Callable[[Running], None] = lambda _sequence: None,
) -> Tally:
    """Run a trace, `concurrency` requests at a time.

    refresh_every: number of finished requests between refreshes; None: refresh before every draft. on_finish: called
    with each request that ends.
    """
    tally, inserting = Tally(), Stopwatch()
    arrivals = Arrivals(trace)
    running: list[Running] = []
    cold_until = COLD_SHARE * trace.output_tokens
    unrefreshed = 0
    while True:
        while len(running) < concurrency and (sequence := arrivals.next(running)):
            with inserting:
                contestant.start(sequence)
            tally.prompt_tokens += sequence.request.prompt_length
            running.append(sequence)
        if not running:
            break
        if refresh_every is None or unrefreshed >= refresh_every:
            with inserting:
                contestant.refresh()
            unrefreshed = 0
        drafts, seconds = contestant.draft(running)
        tally.draft_s += [seconds / len(running)] * len(running)
        is_cold = tally.output_tokens < cold_until
        for sequence, draft in zip(running, drafts, strict=True):
            verify(sequence, draft, tally, is_cold)
            take_in = contestant.finish if sequence.is_finished else contestant.commit
            with inserting:
                take_in(sequence)
        for sequence in running:
            if sequence.is_finished:
                unrefreshed += 1
                on_finish(sequence)
        running = [sequence for sequence in running if not sequence.is_finished]
    tally.insert_s, tally.bytes_per_token = inserting.seconds, contestant.bytes_per_token()
    return tally


def replay_known(
    entry: Entry,
    trace: Trace,
    concurrency: int = 1,
    refresh_every: int | None = None,
    on_finish: Callable[[Running], None] = lambda _sequence: None,
) -> Tally:
    """Replay a trace twice with one drafter, and return the tally of the second time, when all answers are known."""
    again = trace.again()
    contestant = entry.build(Trace(trace.name, trace.requests + again.requests))
    replay(contestant, trace, concurrency, refresh_every, on_finish)
    contestant.refresh()
    return replay(contestant, again, concurrency, refresh_every, on_finish)


def verify(sequence: Running, draft: Draft, tally: Tally, is_cold: bool) -> None:
    """Verify one draft: accept, commit and count."""
    agrees, accepted = walk(draft, sequence.output, sequence.done)
    before = sequence.done
    sequence.advance(len(agrees), accepted)
    tally.steps += 1
    tally.output_tokens += sequence.done - before
    tally.drafted += len(agrees)
    tally.accepted += accepted
    if draft.path_probs is not None:
        tally.has_probs = True
        tally.path_probs += draft.path_probs
        tally.agrees += agrees
        tally.cold_tokens += len(agrees) if is_cold else 0


def walk(draft: Draft, output: Sequence[int], done: int) -> tuple[list[bool], int]:
    """Return which tokens of a draft after `output[:done]` are on a path of the output, and the longest such path."""
    agrees: list[bool] = []
    depths: list[int] = []
    accepted = 0
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        depth = depths[parent] + 1 if parent >= 0 else 1
        at = done + depth - 1
        agree = (parent < 0 or agrees[parent]) and at < len(output) and output[at] == token
        if agree:
            accepted = max(accepted, depth)
        depths.append(depth)
        agrees.append(agree)
    return agrees, accepted
