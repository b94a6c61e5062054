"""The plain scheme of the article that this project began from, kept as the baseline to measure against.

TitanML, "The Next Leap in Speculative Decoding: Inside TitanML's Takeoff Engine": at an interval build the
suffix array of a circular buffer of finished requests; look for the last 10 tokens, then 9, ... down to 1;
among the matches count the whole continuations, cut to the draft's length, and take the most frequent.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numba import types
from pydivsufsort import divsufsort

from ssd.config import DrafterConfig
from ssd.corpus.ring import SEPARATOR, check_capacity, check_tokens
from ssd.kernels.jit import Int, Tokens, TokensOut, inline, kernel
from ssd.stats import Stats
from ssd.types import NO_PATH, DraftBatch, Path, Progress, check_verified

LONGEST_PATTERN = 10
"""Tokens looked for first, as in the article."""
SAMPLES = 32
"""Matches whose continuations are counted."""

END = np.array([SEPARATOR], np.uint32)


class ArticleCorpus:
    """The last `capacity` tokens of finished requests and their suffix array, built anew at an interval."""

    REST_PER_BUILD = 3.0
    """The maintainer rests at least this many times as long as it built."""

    def __init__(self, capacity: int) -> None:
        """Raises ValueError for a capacity that no corpus can have."""
        check_capacity(capacity)
        self._capacity = capacity
        self._requests: deque[np.ndarray] = deque()
        self._size = 0
        self._changed = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._maintainer: threading.Thread | None = None
        self.view = (np.empty(0, np.uint32), np.empty(0, np.uint32))
        """The text and its suffix array, both uint32."""

    @property
    def tokens(self) -> int:
        """Tokens remembered, separators included."""
        return self._size

    @property
    def nbytes(self) -> int:
        """Memory that is held."""
        return 4 * self._size + sum(array.nbytes for array in self.view)

    def append(self, tokens: np.ndarray) -> None:
        """Remember one request, uint32 [N]. Raises ValueError if an id is the separator's."""
        check_tokens(tokens)
        with self._lock:
            self._requests.append(np.concatenate((tokens[1 - self._capacity :], END)))
            self._size += len(self._requests[-1])
            while self._size > self._capacity:
                self._size -= len(self._requests.popleft())
            self._changed = True

    def refresh(self) -> float:
        """Build the suffix array again if anything came; returns how long that took, in seconds."""
        with self._lock:
            requests, changed = list(self._requests), self._changed
            self._changed = False
        if not changed:
            return 0.0
        began = time.perf_counter()
        text = np.concatenate(requests)
        self.view = (text, divsufsort(text).astype(np.uint32))
        return time.perf_counter() - began

    def maintain(self, interval_s: float) -> None:
        """Refresh at an interval, in a thread of its own."""
        self._maintainer = threading.Thread(target=self._refresh_until_stopped, args=(interval_s,), daemon=True)
        self._maintainer.start()

    def close(self) -> None:
        """Stop the maintainer."""
        self._stopping.set()
        if self._maintainer is not None:
            self._maintainer.join()
            self._maintainer = None

    def _refresh_until_stopped(self, interval_s: float) -> None:
        rest = interval_s
        while not self._stopping.wait(rest):
            rest = max(interval_s, self.REST_PER_BUILD * self.refresh())


@dataclass
class Running:
    """A started sequence: its text so far, in a buffer with room to grow."""

    text: np.ndarray
    size: int
    prompt_length: int
    draft: np.ndarray = field(default_factory=lambda: NO_PATH.tokens)
    """uint32: the tokens of its last draft."""

    def extend(self, tokens: np.ndarray) -> None:
        """Append tokens, uint32 [n]."""
        end = self.size + len(tokens)
        if end > len(self.text):
            self.text = np.concatenate((self.text[: self.size], np.empty(end + 256, np.uint32)))
        self.text[self.size : end] = tokens
        self.size = end


class ArticleDrafter:
    """Decreasing match lengths over a forward suffix array; the most frequent whole continuation, without odds."""

    def __init__(
        self, config: DrafterConfig, *, corpus: ArticleCorpus | None = None, stats: Stats | None = None
    ) -> None:
        """Without `corpus` the drafter has one of its own, refreshed in the background until `close`."""
        self.config = config
        self.stats = stats or Stats()
        self._owns_corpus = corpus is None
        self.corpus = corpus or ArticleCorpus(config.capacity)
        if self._owns_corpus:
            self.corpus.maintain(config.refresh_interval_s)
        self._running: dict[int, Running] = {}

    def start(
        self, sequence_id: int, prompt: np.ndarray, *, session_id: Hashable = None, request_id: str | None = None
    ) -> None:
        """Begin a sequence, as `SuffixDrafter.start`; sessions and names mean nothing here."""
        del session_id, request_id
        if sequence_id in self._running:
            raise ValueError(f"sequence {sequence_id} was started before and not finished")
        check_tokens(prompt)
        self._running[sequence_id] = Running(prompt.copy(), len(prompt), len(prompt))

    def draft(self, progress: Progress) -> DraftBatch:
        """Take note of what was committed and draft what may follow. Raises ValueError as `Progress.check` does."""
        progress.check(self.offered())
        offsets, limits = progress.offsets.tolist(), progress.max_draft.tolist()
        verified = progress.verified.tolist()
        steps = [1] * len(limits) if progress.steps is None else progress.steps.tolist()
        paths = []
        for index, sequence_id in enumerate(progress.sequence_ids.tolist()):
            running = self._running[sequence_id]
            committed = progress.tokens[offsets[index] : offsets[index + 1]]
            self._commit(running, committed, verified[index], steps[index])
            paths.append(self._path(running, min(limits[index], self.config.max_draft)))
            running.draft = paths[-1].tokens
        return DraftBatch.from_paths(paths)

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = True) -> None:
        """End a sequence, as `SuffixDrafter.finish`."""
        check_tokens(tokens)
        check_verified(sequence_id, verified, self.offered())
        running = self._running.pop(sequence_id)
        self._commit(running, tokens, verified)
        if learn and running.size:
            lead = max(0, running.prompt_length - self.config.learned_prompt_tokens)
            self.corpus.append(running.text[lead : running.size].copy())

    def offered(self) -> dict[int, int]:
        """The running sequences, each with the tokens of its last draft."""
        return {sequence_id: len(running.draft) for sequence_id, running in self._running.items()}

    def memory_bytes(self) -> int:
        """Memory of the corpus."""
        return self.corpus.nbytes

    def close(self) -> None:
        """Forget the running sequences and stop the background refresh of a corpus of its own."""
        self._running.clear()
        if self._owns_corpus:
            self.corpus.close()

    def _commit(self, running: Running, tokens: np.ndarray, verified: int, steps: int = 1) -> None:
        if len(tokens):
            compared = min(verified, len(tokens))
            differs = np.flatnonzero(running.draft[:compared] != tokens[:compared])
            accepted = int(differs[0]) if len(differs) else compared
            self.stats.record_path(len(tokens), verified, accepted, max(1, steps))
        running.extend(tokens)

    def _path(self, running: Running, limit: int) -> Path:
        """A path of at most `limit` tokens. The scheme has no odds: the first token carries its path's share."""
        text, order = self.corpus.view
        left, right, length = longest_pattern(text, order, running.text[: running.size], LONGEST_PATTERN)
        size = right - left
        count = min(size, SAMPLES)
        if count == 0 or limit == 0:
            return NO_PATH
        positions = order[left + (2 * np.arange(count) + 1) * size // (2 * count)]
        start, size, votes = commonest_continuation(text, positions, count, length, limit)
        odds = np.ones(size, np.float32)
        odds[:1] = votes / count
        return Path(text[start : start + size], odds, match_length=length)


@inline
def _bound(text, order, context, first, after_equal):  # type: ignore[no-untyped-def]
    """The first place in `order` whose text is not less than `context[first:]`, or not even equal to it."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        at, index = order[middle], first
        while index < len(context) and at < len(text) and text[at] == context[index]:
            at += 1
            index += 1
        is_prefix = index == len(context)
        if after_equal if is_prefix else (at == len(text) or text[at] < context[index]):
            low = middle + 1
        else:
            high = middle
    return low


@kernel(Tokens, Tokens, Tokens, Int, returns=types.UniTuple(Int, 3))
def longest_pattern(text, order, context, longest):  # type: ignore[no-untyped-def]
    """Where the last `longest` tokens of `context` occur, or as many fewer as it takes.

    text, order (its suffix array), context: uint32. Returns (left, right, length): `order[left:right]` begin
    with the last `length` tokens; an empty range and length 0 if not even the last token occurs.
    """
    for length in range(min(longest, len(context)), 0, -1):
        first = len(context) - length
        left = _bound(text, order, context, first, False)
        right = _bound(text, order, context, first, True)
        if left < right:
            return left, right, length
    return 0, 0, 0


@inline
def _continues_alike(text, left, right, size, limit):  # type: ignore[no-untyped-def]
    """Whether the continuation from `left` is the one of `size` tokens from `right`."""
    for offset in range(size):
        if left + offset >= len(text) or text[left + offset] != text[right + offset]:
            return False
    return size == limit or left + size >= len(text) or text[left + size] == SEPARATOR


@kernel(Tokens, TokensOut, Int, Int, Int, returns=types.UniTuple(Int, 3))
def commonest_continuation(text, positions, count, length, limit):  # type: ignore[no-untyped-def]
    """The continuation that most of `positions[:count]` share; of equally common ones that with the latest position.

    A continuation begins `length` tokens on, and ends after `limit` tokens, at a separator or at the end of the
    text. `positions` must be in suffix order, so that equal continuations are neighbours. Returns (start, size, votes).
    """
    best_start, best_size, best_votes, best_newest = 0, 0, 0, -1
    index = 0
    while index < count:
        start = positions[index] + length
        size = 0
        while size < limit and start + size < len(text) and text[start + size] != SEPARATOR:
            size += 1
        votes, newest = 0, -1
        while index < count and _continues_alike(text, positions[index] + length, start, size, limit):
            newest = max(newest, positions[index])
            votes += 1
            index += 1
        if votes > best_votes or (votes == best_votes and newest > best_newest):
            best_start, best_size, best_votes, best_newest = start, size, votes, newest
    return best_start, best_size, best_votes
