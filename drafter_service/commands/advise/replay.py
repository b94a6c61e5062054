"""Replay recorded requests: draft for all running ones, and verify against their recorded outputs.

Recorded outputs take the place of the target's greedy ones. A step drafts for one sequence, accepts the longest path of
the draft that agrees with the output, and adds the target's own next token. Draft tokens after an output's end count as
drafted.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from drafter_service.commands.advise.traffic import Traffic
from ssd.kernels.jit import Longs, Nothing, Parents, Tokens, TokensOut, kernel, outline
from ssd.types import DraftBatch, Progress, Source

SHARED = int(Source.CORPUS)


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

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a step of a sequence produced."""
        return float(self.output_lengths.sum() / self.steps.sum())

    @property
    def drafted_per_step(self) -> float:
        """Mean number of draft tokens in a step of a sequence."""
        return float(self.drafted.sum() / self.steps.sum())


class ReplayedDrafter(Protocol):
    """The drafter of a replay."""

    def start(self, sequence_id: int, prompt: np.ndarray, session: int) -> None:
        """Begin a sequence with its prompt, uint32 [P]; session: -1 for none."""

    def draft(self, progress: Progress) -> DraftBatch:
        """See `ssd.types.Drafter`."""
        ...

    def finish(self, sequence_id: int, tokens: np.ndarray, verified: int) -> None:
        """End a sequence, and learn its output; arguments as in `ssd.types.Drafter`."""


class Arrivals:
    """Hands out requests in the order of their arrival; a turn waits until its session's previous turn has ended."""

    def __init__(self, traffic: Traffic) -> None:
        self._places = iter(enumerate(traffic.in_order().tolist()))
        self._sessions = traffic.sessions.tolist()
        self._busy: set[int] = set()
        self._waiting: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        """Turns of busy sessions, earliest first, as pairs of place and request."""
        self._ready: list[tuple[int, int]] = []
        """Heap of the next turns of sessions that became free."""

    def next(self) -> int | None:
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


class Running:
    """The B requests that run, as parallel arrays."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._text = np.asarray(traffic.tokens)
        self._columns = np.empty((7, 0), np.int64)

    def __len__(self) -> int:
        return self._columns.shape[1]

    @property
    def requests(self) -> np.ndarray:
        """int64 [B]."""
        return self._columns[0]

    @property
    def committed(self) -> np.ndarray:
        """int64 [B]: number of tokens committed in the last step."""
        return self._columns[3]

    @property
    def verified(self) -> np.ndarray:
        """int64 [B]: number of tokens of the last draft."""
        return self._columns[4]

    def add(self, request: int) -> None:
        """Begin a request."""
        start, end = self._traffic.outputs[request], self._traffic.starts[request + 1]
        self._columns = np.column_stack((self._columns, (request, start, end, 0, 0, 0, 0)))

    def progress(self, max_draft: int, cost: float) -> Progress:
        """Return the progress since the last drafts."""
        _, done, _, committed, verified, _, _ = self._columns
        offsets = np.zeros(len(done) + 1, np.uint32)
        np.cumsum(committed, out=offsets[1:])
        tokens = np.empty(int(offsets[-1]), np.uint32)
        _gather(self._text, done - committed, committed, tokens)
        limits = np.full(len(done), max_draft, np.uint32)
        return Progress(self.requests.astype(np.uint64), tokens, offsets, verified.astype(np.uint32), limits, cost)

    def verify(self, drafts: DraftBatch) -> np.ndarray:
        """Verify a batch of drafts, commit the tokens, and return which requests ended, bool [B]."""
        _, done, ends, committed, verified, accepted, last = self._columns
        _accept(self._text, done, ends, drafts.tokens, drafts.parents, drafts.offsets, accepted, last)
        np.minimum(accepted + 1, ends - done, out=committed)
        np.subtract(drafts.offsets[1:], drafts.offsets[:-1], out=verified)
        done += committed
        return np.asarray(done == ends)

    def accepted(self, drafts: DraftBatch) -> Iterator[tuple[int, int, int, bool]]:
        """Yield the request, the end of the accepted tokens in the text, their number, and whether the last one came
        from another request's text, for each accepted draft of the last step.
        """
        rows = np.flatnonzero(self._columns[5])
        requests, done, _, committed, _, accepted, last = self._columns[:, rows]
        is_shared = drafts.source[drafts.offsets[rows] + last] == SHARED
        ends = done - committed + accepted
        yield from zip(requests.tolist(), ends.tolist(), accepted.tolist(), is_shared.tolist(), strict=True)

    def last(self, row: int) -> np.ndarray:
        """Return the tokens that one of the requests committed in the last step, uint32 [n]."""
        _, done, _, committed, *_ = self._columns[:, row]
        return self._text[done - committed : done]

    def keep(self, rows: np.ndarray) -> None:
        """Drop all but some requests; rows: bool [B]."""
        self._columns = np.ascontiguousarray(self._columns[:, rows])


def replay(
    traffic: Traffic,
    drafter: ReplayedDrafter,
    *,
    concurrency: int | np.ndarray,
    max_draft: int,
    cost: float,
    accept: Callable[[int, int, int, bool], None] | None = None,
    watch: Callable[[int], None] = lambda _tokens: None,
) -> Replay:
    """Replay all requests.

    concurrency: largest number of requests that run at once, for all requests or when each one begins (int64 [R]).
    accept: called for each accepted draft with the arguments of `provenance.Tracer.accept`. watch: called with the
    number of output tokens of each request that ended.
    """
    outputs, lengths = traffic.outputs, traffic.output_lengths
    steps, drafted, order = np.zeros(len(traffic), np.int64), np.zeros(len(traffic), np.int64), list[int]()
    limits = np.broadcast_to(concurrency, len(traffic))
    arrivals, running = Arrivals(traffic), Running(traffic)
    upcoming = arrivals.next()
    while True:
        while upcoming is not None and len(running) < limits[upcoming]:
            prompt = traffic.tokens[traffic.starts[upcoming] : outputs[upcoming]]
            drafter.start(upcoming, np.asarray(prompt), int(traffic.sessions[upcoming]))
            running.add(upcoming)
            upcoming = arrivals.next()
        if not len(running):
            break
        drafts = drafter.draft(running.progress(max_draft, cost))
        ended = running.verify(drafts)
        if accept is not None:
            for accepted in running.accepted(drafts):
                accept(*accepted)
        steps[running.requests] += 1
        drafted[running.requests] += running.verified
        if ended.any():
            for row in np.flatnonzero(ended).tolist():
                request = int(running.requests[row])
                drafter.finish(request, running.last(row), int(running.verified[row]))
                arrivals.end(request)
                order.append(request)
                watch(int(lengths[request]))
            running.keep(~ended)
            upcoming = arrivals.next() if upcoming is None else upcoming
    return Replay(steps, drafted, lengths, np.array(order))


@kernel(Tokens, Longs, Longs, TokensOut, returns=Nothing)
def _gather(text, starts, counts, tokens):
    place = 0
    for row in range(len(starts)):
        for offset in range(counts[row]):
            tokens[place] = text[starts[row] + offset]
            place += 1


@outline
def _longest(text, done, end, tokens, parents, depths):
    """Return the length of the longest path of a draft that agrees with the text from `done` on, and its last node.

    depths: int64 [n], overwritten; the depth of each token on an agreeing path, else 0.
    """
    longest, last = 0, -1
    for node in range(len(tokens)):
        depth = 1 if parents[node] < 0 else depths[parents[node]] + 1
        agrees = depth > 1 or parents[node] < 0
        depths[node] = depth if agrees and done + depth <= end and text[done + depth - 1] == tokens[node] else 0
        if depths[node] > longest:
            longest, last = depths[node], node
    return longest, last


@kernel(Tokens, Longs, Longs, Tokens, Parents, Tokens, Longs, Longs, returns=Nothing)
def _accept(text, done, ends, tokens, parents, offsets, accepted, last):
    """Write the number of accepted tokens of each draft, and the index of the last one."""
    depths = np.empty(len(tokens), np.int64)
    for row in range(len(done)):
        first, end = offsets[row], offsets[row + 1]
        accepted[row], last[row] = _longest(
            text, done[row], ends[row], tokens[first:end], parents[first:end], depths[first:end]
        )
