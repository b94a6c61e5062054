"""Replay recorded requests: draft for all running ones, and verify against their recorded outputs.

Recorded outputs take the place of the target's greedy ones. A step drafts for one sequence, accepts the longest path of
the draft that agrees with the output, and adds the target's own next token. Draft tokens after an output's end count as
drafted.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafter_service.commands.advise.provenance import Tracer
from drafter_service.commands.advise.running import Running
from drafter_service.commands.advise.traffic import Traffic
from ssd.base import CorpusDrafter
from ssd.budget.curve import StepCurve
from ssd.types import DraftBatch, Drafter, Progress


@dataclass(frozen=True, eq=False)
class Replay:
    """Counts of a replay, for each of the R requests."""

    steps: np.ndarray
    """int64 [R]: verify steps."""
    drafted: np.ndarray
    """int64 [R]: draft tokens."""
    output_lengths: np.ndarray
    """int64 [R]."""
    order: np.ndarray
    """int64 [R]: requests in the order in which they ended."""
    seconds: float
    """Duration of all steps, without drafting."""

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a step of a sequence produced."""
        return float(self.output_lengths.sum() / self.steps.sum())

    @property
    def drafted_per_step(self) -> float:
        """Mean number of draft tokens in a step of a sequence."""
        return float(self.drafted.sum() / self.steps.sum())


class TimedDrafter:
    """A drafter in a replay, whose drafts are timed. All text is indexed before each draft."""

    clock = staticmethod(time.perf_counter)
    """Returns the seconds by which drafts are timed."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.draft_s = 0.0
        """Seconds in which drafts were made."""

    def start(self, sequence_id: int, prompt: np.ndarray, session: int, **options: Any) -> None:
        """Begin a sequence with its prompt, uint32 [P]; session: -1 for none. options: further ones of the drafter."""
        if session >= 0 and isinstance(self.inner, CorpusDrafter):
            options["session_id"] = session
        self.inner.start(sequence_id, prompt, **options)

    def draft(self, progress: Progress) -> DraftBatch:
        """Return the drafts of the other drafter, which may also come from the outputs of running requests so far."""
        self.refresh()
        began = self.clock()
        drafts = self.inner.draft(progress)
        self.draft_s += self.clock() - began
        return drafts

    def finish(self, sequence_id: int, tokens: np.ndarray, verified: int) -> None:
        """End a sequence, and learn its output; arguments as in `ssd.types.Drafter`."""
        self.inner.finish(sequence_id, tokens, verified=verified, learn=True)

    def refresh(self) -> None:
        """Index all text."""
        if isinstance(self.inner, CorpusDrafter):
            self.inner.corpus.refresh()


class Arrivals:
    """Hands out requests in the order of their arrival; a turn waits until its session's previous turn has ended."""

    def __init__(self, traffic: Traffic, requests: np.ndarray, concurrency: int | np.ndarray) -> None:
        """requests: int64 [n], those to hand out, in the order of their arrival. concurrency: see `steps_of`."""
        self._limits = np.broadcast_to(concurrency, len(traffic))
        self._most = int(self._limits.max(initial=0))
        self._upcoming: int | None = None
        self._places = iter(enumerate(requests.tolist()))
        self._sessions = traffic.sessions.tolist()
        self._busy: set[int] = set()
        self._waiting: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        """Turns of busy sessions, earliest first, as pairs of place and request."""
        self._ready: list[tuple[int, int]] = []
        """Heap of the next turns of sessions that became free."""

    def beginning(self, running: int) -> Iterator[int]:
        """Yield the requests that begin while `running` others run."""
        while running < self._most:
            # The next request is chosen when it can begin, so that one that waited for its session precedes later ones.
            self._upcoming = self._next() if self._upcoming is None else self._upcoming
            if self._upcoming is None or running >= self._limits[self._upcoming]:
                return
            yield self._upcoming
            self._upcoming = None
            running += 1

    def _next(self) -> int | None:
        """Return the next request; None if all others wait for a session or there is none."""
        while True:
            place, request = heapq.heappop(self._ready) if self._ready else next(self._places, (-1, -1))
            if request < 0:
                return None
            session = self._sessions[request]
            if session not in self._busy:
                if session >= 0:
                    self._busy.add(session)
                return request
            self._waiting[session].append((place, request))

    def end(self, request: int) -> None:
        """Record that a request has ended."""
        session = self._sessions[request]
        if session < 0:
            return
        self._busy.discard(session)
        if waiting := self._waiting.get(session):
            heapq.heappush(self._ready, waiting.popleft())


def steps_of(
    traffic: Traffic, requests: np.ndarray, drafter: TimedDrafter, *, concurrency: int | np.ndarray, max_draft: int
) -> Iterator[Running]:
    """Replay requests, and yield the running ones after each step, before those that ended are finished.

    requests: int64 [n], in the order of their arrival. concurrency: largest number of requests that run at once, for
    all requests or when each one begins (int64 [R]).
    """
    arrivals, running = Arrivals(traffic, requests, concurrency), Running(traffic)
    while True:
        for request in arrivals.beginning(len(running)):
            drafter.start(request, traffic.prompt(request), int(traffic.sessions[request]))
            running.add(request)
        if not len(running):
            return
        running.verify(drafter.draft(running.progress(max_draft)))
        yield running
        if running.ended.any():
            for row in np.flatnonzero(running.ended).tolist():
                request = int(running.requests[row])
                drafter.finish(request, running.last(row), int(running.verified[row]))
                arrivals.end(request)
            running.drop_ended()


def replay(
    traffic: Traffic,
    drafter: TimedDrafter,
    curve: StepCurve,
    *,
    concurrency: int | np.ndarray,
    max_draft: int,
    tracer: Tracer | None = None,
    watch: Callable[[int], None] = lambda _tokens: None,
) -> Replay:
    """Replay all requests, see `steps_of`; `watch` is called with the number of output tokens of each that ended."""
    lengths = traffic.output_lengths
    steps, drafted, order = np.zeros(len(traffic), np.int64), np.zeros(len(traffic), np.int64), list[int]()
    seconds = 0.0
    for running in steps_of(traffic, traffic.in_order(), drafter, concurrency=concurrency, max_draft=max_draft):
        if tracer is not None:
            for accepted in running.accepted_paths():
                tracer.accept(*accepted)
        seconds += float(curve.seconds(curve.step_tokens(running.verified), len(running)))
        steps[running.requests] += 1
        drafted[running.requests] += running.verified
        for request in running.requests[running.ended].tolist():
            order.append(request)
            watch(int(lengths[request]))
    return Replay(steps, drafted, lengths, np.array(order), seconds)
