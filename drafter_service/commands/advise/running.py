"""The running requests of a replay: their progress, and the verification of their drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from drafter_service.commands.advise.traffic import Traffic
from ssd.kernels.jit import Longs, Nothing, Parents, Tokens, TokensOut, kernel, outline
from ssd.types import DraftBatch, Progress, Source, StepTime

LOCAL = int(Source.LOCAL)


class Running:
    """The B requests that run, as parallel arrays."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._text = np.asarray(traffic.tokens)
        self._columns = np.empty((7, 0), np.int64)
        self.drafts = DraftBatch.empty(0)
        """The drafts of the last step."""
        self.depths = np.empty(0, np.int64)
        """int64 [T]: depth of each of their tokens that is on a path of the output, 0 for the others."""
        self.ended = np.empty(0, bool)
        """bool [B]: whether the last step committed the end of the output."""
        self.step_times: Sequence[StepTime] = ()
        """Durations for the next progress."""

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
    def accepted(self) -> np.ndarray:
        """int64 [B]: number of tokens accepted in the last step."""
        return self._columns[5]

    @property
    def verified(self) -> np.ndarray:
        """int64 [B]: number of tokens of the last draft."""
        return self._columns[4]

    def add(self, request: int) -> None:
        """Begin a request."""
        start, end = self._traffic.starts[request : request + 2]
        output = start + self._traffic.prompt_lengths[request]
        self._columns = np.column_stack((self._columns, (request, output, end, 0, 0, 0, 0)))

    def progress(self, max_draft: int) -> Progress:
        """Return the progress since the last drafts."""
        _, done, _, committed, verified, _, _ = self._columns
        offsets = np.zeros(len(done) + 1, np.uint32)
        np.cumsum(committed, out=offsets[1:])
        tokens = np.empty(int(offsets[-1]), np.uint32)
        _gather(self._text, done - committed, committed, tokens)
        limits = np.full(len(done), max_draft, np.uint32)
        times, self.step_times = self.step_times, ()
        ids, verified = self.requests.astype(np.uint64), verified.astype(np.uint32)
        return Progress(ids, tokens, offsets, verified, limits, step_times=times)

    def verify(self, drafts: DraftBatch) -> None:
        """Verify a batch of drafts, and commit the tokens."""
        _, done, ends, committed, verified, accepted, last = self._columns
        self.drafts, self.depths = drafts, np.empty(len(drafts.tokens), np.int64)
        _accept(self._text, done, ends, drafts.tokens, drafts.parents, drafts.offsets, self.depths, accepted, last)
        np.minimum(accepted + 1, ends - done, out=committed)
        np.subtract(drafts.offsets[1:], drafts.offsets[:-1], out=verified)
        done += committed
        self.ended = done == ends

    def accepted_paths(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield the request, the end of the accepted tokens in the text, their number, and whether the last one came
        from another request's text, for each accepted draft of the last step.
        """
        rows = np.flatnonzero(self.accepted)
        requests, done, _, committed, _, accepted, last = self._columns[:, rows]
        is_shared = self.drafts.source[self.drafts.offsets[rows] + last] != LOCAL
        ends = done - committed + accepted
        yield from zip(requests.tolist(), ends.tolist(), accepted.tolist(), is_shared.tolist(), strict=True)

    def last(self, row: int) -> np.ndarray:
        """Return the tokens that one of the requests committed in the last step, uint32 [n]."""
        _, done, _, committed, *_ = self._columns[:, row]
        return self._text[done - committed : done]

    def drop_ended(self) -> None:
        """Drop the requests that ended."""
        self._columns = np.ascontiguousarray(self._columns[:, ~self.ended])


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


@kernel(Tokens, Longs, Longs, Tokens, Parents, Tokens, Longs, Longs, Longs, returns=Nothing)
def _accept(text, done, ends, tokens, parents, offsets, depths, accepted, last):
    """Write the depths of `Running.depths`, the number of accepted tokens of each draft, and the last one's index."""
    for row in range(len(done)):
        first, end = offsets[row], offsets[row + 1]
        accepted[row], last[row] = _longest(
            text, done[row], ends[row], tokens[first:end], parents[first:end], depths[first:end]
        )
