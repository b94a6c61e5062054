"""The replay: draft for all running requests, and verify the drafts against their recorded outputs.

Recorded outputs take the place of the target's greedy ones. A step drafts for each running request, accepts the longest
path of the draft that agrees with the output, and adds the target's own next token. Draft tokens after an output's end
count as drafted.
"""

from __future__ import annotations

import heapq
import inspect
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ssd.base import CorpusDrafter
from ssd.budget.curve import StepCurve
from ssd.config import DrafterConfig
from ssd.kernels.jit import LongRows, Longs, Nothing, Parents, Tokens, TokensOut, kernel, outline
from ssd.replay.recording import Recording
from ssd.types import DraftBatch, Drafter, Progress, StepTime, offsets_of

REQUEST, DONE, END, COMMITTED, DRAFTED, ACCEPTED, LAST = range(7)
"""Rows of `Step`'s table: the request; the end of its committed text and of its output in `Recording.tokens`; and of
the last step the committed, draft and accepted tokens, and the index of the last accepted one in the draft."""
STEPS, ALL_DRAFTED, ALL_ACCEPTED, ALL_COMMITTED = range(4)
"""Rows of the table of counts."""


@dataclass(frozen=True, eq=False)
class Counts:
    """Counts of a replay, for each of the R requests of the recording; 0 for requests that were not replayed."""

    steps: np.ndarray
    """int64 [R]: verify steps."""
    drafted: np.ndarray
    """int64 [R]: draft tokens."""
    accepted: np.ndarray
    """int64 [R]: draft tokens that were accepted."""
    tokens: np.ndarray
    """int64 [R]: output tokens."""
    order: np.ndarray
    """int64 [n]: the replayed requests, in the order in which they ended."""
    seconds: float
    """Duration of all steps by the step-time curve, without drafting; 0 without a curve."""
    draft_s: float
    """Duration of all calls of `Drafter.draft`."""
    other_s: float
    """Duration of all other calls of the drafter, and of the refreshes of its corpus."""

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a step of a sequence produced."""
        return float(self.tokens.sum() / self.steps.sum())

    @property
    def drafted_per_step(self) -> float:
        """Mean number of draft tokens in a step of a sequence."""
        return float(self.drafted.sum() / self.steps.sum())

    def speedup_at(self, cost: float) -> float:
        """Return S, the speed-up over decoding without drafts: tokens per step / (1 + cost * drafted per step).

        cost: duration of verifying one more token, as a fraction of a step without drafts.
        """
        return self.tokens_per_step / (1 + cost * self.drafted_per_step)


class Step:
    """The B running requests after a step. It changes with the next step."""

    def __init__(self, recording: Recording, counts: np.ndarray, max_draft: int) -> None:
        """counts: int64 [4, R], to which steps are added. max_draft: largest number of tokens in a draft."""
        self._recording, self._counts, self._max_draft = recording, counts, max_draft
        self._text = np.asarray(recording.tokens)
        self._set(np.empty((7, 0), np.int64))
        self.drafts = DraftBatch.empty(0)
        """The drafts that were verified."""
        self.depths = np.empty(0, np.int64)
        """int64 [T]: depth of each of their tokens that is on a path of the output, 0 for the others."""
        self.ended = np.empty(0, bool)
        """bool [B]: whether the step committed the end of the output."""
        self.draft_s = 0.0
        """Duration of the call that drafted."""
        self.step_times: Sequence[StepTime] = ()
        """Durations that the drafter is told with the next step."""

    def _set(self, table: np.ndarray) -> None:
        self._table = table
        self.requests = table[REQUEST]
        """int64 [B]: the running requests."""
        self.drafted = table[DRAFTED]
        """int64 [B]: number of draft tokens of each request."""
        self.accepted = table[ACCEPTED]
        """int64 [B]: number of them that were accepted."""
        self.committed = table[COMMITTED]
        """int64 [B]: number of output tokens that were committed."""
        self.ends = table[DONE]
        """int64 [B]: index in `Recording.tokens` after the last committed token."""
        self.last_accepted = table[LAST]
        """int64 [B]: index of the last accepted token in the request's own draft, -1 for none."""

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: int) -> None:
        """Begin a request."""
        start, end = self._recording.starts[request : request + 2]
        output = start + self._recording.prompt_lengths[request]
        self._set(np.column_stack((self._table, (request, output, end, 0, 0, 0, -1))))

    def progress(self) -> Progress:
        """Return the progress since the last drafts."""
        offsets = offsets_of(self.committed)
        tokens = np.empty(int(offsets[-1]), np.uint32)
        _gather(self._text, self._table, tokens)
        limits = np.full(len(self), self._max_draft, np.uint32)
        times, self.step_times = self.step_times, ()
        ids, drafted = self.requests.astype(np.uint64), self.drafted.astype(np.uint32)
        return Progress(ids, tokens, offsets, drafted, limits, step_times=times)

    def verify(self, drafts: DraftBatch) -> None:
        """Verify a batch of drafts, commit the tokens and count them."""
        self.drafts, self.depths = drafts, np.empty(len(drafts.tokens), np.int64)
        _verify(self._text, drafts.tokens, drafts.parents, drafts.offsets, self.depths, self._table, self._counts)
        self.ended = self.ends == self._table[END]

    def last(self, row: int) -> np.ndarray:
        """Return the tokens that one of the requests committed, uint32 [n]."""
        return self._text[self.ends[row] - self.committed[row] : self.ends[row]]

    def drop_ended(self) -> None:
        """Drop the requests that ended."""
        self._set(np.ascontiguousarray(self._table[:, ~self.ended]))


@kernel(Tokens, LongRows, TokensOut, returns=Nothing)
def _gather(text, table, tokens):  # type: ignore[no-untyped-def]
    """Write the tokens that the last step committed into `tokens`, uint32 [T]."""
    place = 0
    for row in range(table.shape[1]):
        for index in range(table[DONE, row] - table[COMMITTED, row], table[DONE, row]):
            tokens[place] = text[index]
            place += 1


@outline
def _longest(text, done, end, tokens, parents, depths):  # type: ignore[no-untyped-def]
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


@kernel(Tokens, Tokens, Parents, Tokens, Longs, LongRows, LongRows, returns=Nothing)
def _verify(text, tokens, parents, offsets, depths, table, counts):  # type: ignore[no-untyped-def]
    """Verify the drafts of all rows: write `Step.depths` and the rest of the table, and add to the counts."""
    for row in range(table.shape[1]):
        done, first, end = table[DONE, row], offsets[row], offsets[row + 1]
        accepted, last = _longest(text, done, table[END, row], tokens[first:end], parents[first:end], depths[first:end])
        committed, drafted = min(accepted + 1, table[END, row] - done), np.int64(end - first)
        table[DONE, row], table[COMMITTED, row], table[DRAFTED, row] = done + committed, committed, drafted
        table[ACCEPTED, row], table[LAST, row] = accepted, last
        request = table[REQUEST, row]
        counts[STEPS, request] += 1
        counts[ALL_DRAFTED, request] += drafted
        counts[ALL_ACCEPTED, request] += accepted
        counts[ALL_COMMITTED, request] += committed


class Arrivals:
    """Hands out requests in the order of their arrival; a turn waits until its session's previous turn has ended."""

    def __init__(self, recording: Recording, requests: np.ndarray, concurrency: int | np.ndarray) -> None:
        """requests: int64 [n], those to hand out, in the order of their arrival. concurrency: see `replay`."""
        self._limits = np.broadcast_to(concurrency, len(recording))
        self._most = int(self._limits.max(initial=0))
        self._upcoming: int | None = None
        self._places = iter(enumerate(requests.tolist()))
        self._sessions = recording.sessions.tolist()
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


class _TimedDrafter:
    """Calls a drafter, and measures the duration of the calls."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float]) -> None:
        self._drafter, self._clock = drafter, clock
        self.takes_sessions = "session_id" in inspect.signature(drafter.start).parameters
        self.draft_s = self.other_s = 0.0

    def draft(self, progress: Progress) -> DraftBatch:
        """Draft after all text was indexed, so that drafts do not depend on the time that this takes."""
        if isinstance(self._drafter, CorpusDrafter):
            self.call(self._drafter.corpus.refresh)
        began = self._clock()
        drafts = self._drafter.draft(progress)
        self.draft_s += self._clock() - began
        return drafts

    def call(self, method: Callable[..., object], *given: object, **options: object) -> None:
        """Call another method of the drafter or its corpus."""
        began = self._clock()
        method(*given, **options)
        self.other_s += self._clock() - began


def replay(
    recording: Recording,
    drafter: Drafter,
    *,
    curve: StepCurve | None = None,
    concurrency: int | np.ndarray = 1,
    max_draft: int = DrafterConfig.max_draft,
    batches: Sequence[np.ndarray] | None = None,
    options: Callable[[int], Mapping[str, object]] = lambda _request: {},
    clock: Callable[[], float] = time.perf_counter,
    observe: Callable[[Step], None] = lambda _step: None,
) -> Counts:
    """Replay a recording with a drafter, from the drafter's present state on, and return the counts.

    Requests begin in the order of their arrival, a turn of a conversation after the previous one has ended. A drafter
    over a corpus indexes all text before each draft, so the result is the same each time.

    curve: durations of the target's steps, to sum up; it does not change drafts. concurrency: largest number of
    requests that run at once, one for all requests or that when each one begins, int64 [R]. max_draft: largest number
    of tokens in a draft. batches: numbers of requests, int64 [n] each, to replay one batch after another; None: all.
    options: returns further arguments of `drafter.start` for a request, beside the session id, which drafters that
    take one are given. clock: returns seconds, to measure the drafter's calls. observe: called after each step.
    """
    counts, order, seconds = np.zeros((4, len(recording)), np.int64), list[int](), 0.0
    timed, step = _TimedDrafter(drafter, clock), Step(recording, counts, max_draft)
    for batch in [recording.in_order()] if batches is None else batches:
        arrivals = Arrivals(recording, batch, concurrency)
        while True:
            for request in arrivals.beginning(len(step)):
                session, given = int(recording.sessions[request]), dict(options(request))
                if timed.takes_sessions and session >= 0:
                    given.setdefault("session_id", str(session))
                # Its sequence id is its number.
                timed.call(drafter.start, request, recording.prompt(request), **given)
                step.add(request)
            if not len(step):
                break
            drafted_s = timed.draft_s
            step.verify(timed.draft(step.progress()))
            step.draft_s = timed.draft_s - drafted_s
            if curve is not None:
                seconds += float(curve.seconds(curve.step_tokens(step.drafted), len(step)))
            observe(step)
            if step.ended.any():
                for row in np.flatnonzero(step.ended).tolist():
                    request = int(step.requests[row])
                    timed.call(drafter.finish, request, step.last(row), verified=int(step.drafted[row]))
                    arrivals.end(request)
                    order.append(request)
                step.drop_ended()
    return Counts(
        steps=counts[STEPS],
        drafted=counts[ALL_DRAFTED],
        accepted=counts[ALL_ACCEPTED],
        tokens=counts[ALL_COMMITTED],
        order=np.array(order, np.int64),
        seconds=seconds,
        draft_s=timed.draft_s,
        other_s=timed.other_s,
    )
