"""The corpus: finished and running requests, and an index over them that queries read without locks.

Callers put changes into queues; a maintainer thread applies them and publishes a new view of the index. The output of
running requests is in `ssd.kernels.live`. This module does not know how drafts are chosen.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from traceback import clear_frames

import numpy as np

from ssd.config import MAX_MATCH_DEPTH, DrafterConfig
from ssd.corpus.index import Index, MergeTimes, State
from ssd.corpus.requests import NO_NAME, Forget, Text, hash_of
from ssd.corpus.ring import SEPARATOR, check_tokens
from ssd.corpus.view import RING_HEAD, View
from ssd.errors import UserError
from ssd.kernels.fallback import FallbackTable
from ssd.kernels.learned import LearnedTables
from ssd.kernels.live import LiveTier

logger = logging.getLogger(__name__)

MAINTAINER_NICENESS = 5
"""Niceness that is added for the maintainer thread. Where cores are busy, 5 keeps most merges from delaying drafts; 10
delayed new text by 0.2 s."""

RETRY_S = 1.0
"""Time after which the maintainer repeats a refresh that failed, in seconds; until then, it applies no changes."""

MIN_WAITING = 1 << 20
"""Least value of `Corpus.max_waiting`, in tokens."""

ROWS_AT_ONCE = 1 << 13
"""Number of requests that are read at a time, in about 2 ms, after which other threads can run."""


class Corpus:
    """All remembered tokens and their index. Any thread may use it."""

    def __init__(
        self, capacity: int, depth: int = DrafterConfig.match_depth, clock: Callable[[], float] = time.time
    ) -> None:
        """Make an empty corpus.

        capacity: tokens remembered; the newest overwrite the oldest. depth: maximum match length in tokens.
        clock: function that returns the time in seconds, recorded for each request. Raises ValueError for a capacity
        outside 4,096 to 4,042,321,904, and for a depth outside 1 to 64.
        """
        if not 1 <= depth <= MAX_MATCH_DEPTH:
            raise ValueError(f"depth must be 1 to {MAX_MATCH_DEPTH}, not {depth}")
        self.capacity, self.depth = capacity, depth
        self.max_waiting = max(capacity, MIN_WAITING)
        """Number of tokens that may wait for a refresh; more would overwrite each other."""
        self.clock = clock
        self._index = Index(capacity, depth)
        self._inbox: deque[Text | Forget] = deque()
        self._waiting: deque[Text] = deque()
        self._forgets: list[Forget] = []
        """Commands that the index has not executed yet; they stay here if it fails."""
        self._owners = itertools.count()
        self._running = 0
        self._appended = self._indexed = 0
        self._read = 0
        """Tokens read from the inbox since the last complete refresh, including those that are forgotten at once."""
        self._has_failed = False
        """Whether the last refresh was not completed."""
        self._count_lock = threading.Lock()
        self._libraries: tuple[Corpus, ...] = ()
        self.learned = LearnedTables.new()
        self.fallback = FallbackTable(clock())
        self.live = LiveTier(depth)
        self._refresh_lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._maintainer: threading.Thread | None = None
        self._process = os.getpid()
        """The process that the maintainer runs in."""

    @classmethod
    def from_config(cls, config: DrafterConfig, clock: Callable[[], float] = time.time) -> Corpus:
        """Make an empty corpus of a configuration's capacity and match depth."""
        return cls(config.capacity, config.match_depth, clock)

    @property
    def view(self) -> View:
        """The newest view. Drop the reference after reading: its memory is reused once there are no references."""
        return self._index.view

    @property
    def library_views(self) -> tuple[View, ...]:
        """The newest views of the libraries; drop the references as that of `view`."""
        return tuple([library.view for library in self._libraries]) if self._libraries else ()

    @property
    def libraries(self) -> tuple[Corpus, ...]:
        """The corpora that `read_from` named."""
        return self._libraries

    def read_from(self, *libraries: Corpus) -> None:
        """Use the finished requests of other corpora as evidence for drafts, too, instead of those of an earlier call.

        Nothing is written to them, and how reliable their text is here is learned by this corpus. Running requests and
        the libraries of a library are not read. The caller keeps them open. Raises ValueError for another match depth,
        and for a library that is this corpus or reads it.
        """
        for library in libraries:
            if library.depth != self.depth:
                raise ValueError(f"the library has match depth {library.depth}, this corpus {self.depth}")
            if library is self or library.reads(self):
                raise ValueError("a corpus cannot read itself, directly or through its libraries")
        self._libraries = libraries

    def reads(self, other: Corpus) -> bool:
        """Return whether `other` is one of the libraries, or of theirs."""
        return any(library is other or library.reads(other) for library in self._libraries)

    @property
    def tokens(self) -> int:
        """Tokens remembered, separators included, from the oldest request that was not forgotten."""
        rows, ring = self._index.log.rows, self._index.ring
        return ring.head - max(ring.oldest, int(rows["first"][0])) if len(rows) else 0

    @property
    def requests(self) -> int:
        """Number of requests remembered; each piece of a very long request counts."""
        rows, oldest = self._index.log.rows, self._index.ring.oldest
        # The oldest rows may be of text that is not remembered any more, and not overwritten yet.
        return len(rows) - max(0, bisect_right(rows["first"], oldest) - 1)

    @property
    def waiting_requests(self) -> int:
        """Number of appended requests that are not in the index yet, and of commands to forget."""
        return len(self._inbox) + len(self._waiting)

    def text_of(self, request_id: str) -> np.ndarray:
        """Return the newest text that was appended under a request id, uint32 [N]; empty if it is not in the ring.

        Takes no lock, so text may be damaged if it is overwritten or forgotten meanwhile: compare it with a digest.
        Of text that was divided because of its length, only the last piece is returned.
        """
        rows, ring = self._index.log.rows, self._index.ring
        found = np.flatnonzero(rows["name"] == hash_of(request_id))
        first, end = 0, 0
        if len(found):
            first, end = np.append(rows["first"], ring.head)[found[-1] : found[-1] + 2].tolist()
        if not ring.oldest <= first < end <= ring.head:
            return np.empty(0, np.uint32)
        text = ring.read(first, end)
        return text[: int((text == SEPARATOR).argmax())]

    def request_times(self) -> dict[int, float]:
        """Return the time at which each request id was last appended, by its hash (`ssd.corpus.requests.hash_of`)."""
        rows, times = self._index.log.rows, dict[int, float]()
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[first : first + ROWS_AT_ONCE]
            times.update(zip(part["name"].tolist(), part["time"].tolist(), strict=True))
        return times

    @property
    def indexed(self) -> int:
        """Number of tokens in the newest view, counted since the corpus was made, separators included."""
        return int(self.view.arrays.ring[RING_HEAD])

    @property
    def appended(self) -> int:
        """Number of tokens appended since the corpus was made."""
        return self._appended

    @property
    def waiting(self) -> int:
        """Number of appended tokens that are not in the index yet; bulk loaders should limit it."""
        return self._appended - self._indexed

    @property
    def is_merging(self) -> bool:
        """Whether a merge into the base tier is in progress; each `refresh` does a slice of it."""
        return self._index.is_merging

    @property
    def erasures(self) -> int:
        """Number of times that finished text was erased because it was forgotten."""
        return self._index.ring.erasures

    @property
    def times(self) -> MergeTimes:
        """Counts of the maintainer's work."""
        return self._index.times

    def append(
        self, tokens: np.ndarray, request_id: str | None = None, tag: int = 0, *, time: float | None = None
    ) -> bool:
        """Remember a copy of one request, uint32 [N]; the next refresh adds it to the index.

        request_id: a name to forget it by. tag: of a rollout, see `Rollout.tag`. time: when it finished, by the clock;
        None: now. Returns False, and counts the request in `times.dropped`, if too many tokens wait for a maintainer
        that does not progress; without a maintainer, this refreshes instead.

        Raises ValueError for another dtype or shape, for the separator's id, for a tag of more than 16 bits, and for a
        time that is not finite, and UserError as `maintain`.
        """
        self._check_process()
        check_tokens(tokens)
        if time is not None and not math.isfinite(time):
            raise ValueError(f"time must be a finite number of seconds, not {time}")
        if not 0 <= tag < 1 << 16:
            raise ValueError(f"tag must have 16 bits, not be {tag}")
        if len(tokens):
            if self.waiting > self.max_waiting and not self._make_room():
                return False
            text = Text(tokens.copy(), hash_of(request_id), self.clock() if time is None else time, tag)
            with self._count_lock:
                self._appended += len(tokens)
            self._put(text)
        return True

    def _make_room(self) -> bool:
        """Refresh if nothing else does; return whether another request can be appended."""
        if self._maintainer is None:
            self.refresh()
            return True
        with self._count_lock:
            self.times.dropped += 1
        return False

    def forget(self, request_id: str) -> Forget:
        """Forget what was appended under a request id; after the next `refresh` no draft or new snapshot contains it.

        Earlier snapshots still contain it: save again. Running requests are forgotten through their drafter. Returns
        the command, whose `requests` the refresh counts.
        """
        command = Forget(name=hash_of(request_id))
        self._put(command)
        return command

    def forget_older_than(self, age_s: float) -> Forget:
        """Forget what was appended more than `age_s` seconds ago; see `forget`."""
        command = Forget(before=self.clock() - age_s)
        self._put(command)
        return command

    def start_running(self) -> int:
        """Register a running request; return its number in the live tier. Raises UserError as `maintain`."""
        self._check_process()
        with self._count_lock:
            self._running += 1
        return next(self._owners)

    def publish(self, state: np.ndarray, rows: np.ndarray) -> None:
        """Offer what running requests have produced to others, if there are any; see `LiveTier.publish`.

        Wakes the maintainer if there is too much to merge for the thread that drafts.
        """
        if self._running > 1 and self.live.publish(state, rows):
            self._wake.set()

    def end_running(self, owner: int) -> None:
        """Unregister a running request, and `hide_running`."""
        with self._count_lock:
            self._running -= 1
        self.hide_running(owner)

    def hide_running(self, owner: int) -> None:
        """Offer the output of a running request to nobody any more."""
        if self.live.end(owner):
            self._wake.set()

    def refresh(self) -> None:
        """Apply all queued changes now: index what was appended, and erase what was forgotten.

        Raises UserError as `maintain`.
        """
        self._check_process()
        with self._refresh_lock:
            if self.live.is_waiting:
                self.live.merge()
                if self.live.is_waiting:  # Another thread was in the way.
                    self._wake.set()
            has_changes = self._inbox or self._forgets or self._waiting
            if not (has_changes or self._index.is_merging or self._has_failed):
                return
            began = time.perf_counter()
            if self._has_failed:
                # The last view may have suffix arrays that the steps below wait for.
                self._index.publish()
            self._has_failed = True
            try:
                self._apply_changes()
            except BaseException as problem:
                # Whoever keeps the exception, such as a log handler, must not keep suffix arrays that the next refresh
                # waits for.
                clear_frames(problem.__traceback__)
                raise
            self._has_failed = False
            self.times.on_refresh(time.perf_counter() - began)

    def state(self) -> State:
        """Return the index's finished requests; see `State` for how long it can be read."""
        with self._refresh_lock:
            return self._index.state()

    def restore(self, text: np.ndarray, positions: np.ndarray, covered: int, rows: np.ndarray) -> None:
        """Fill an empty corpus with the contents of another; see `Index.restore`."""
        with self._refresh_lock:
            self._index.restore(text, positions, covered, rows)

    def maintain(self, interval_s: float) -> None:
        """Refresh in a background thread whenever there are changes, at most once per interval, until `close`.

        In a forked child, methods that add text or refresh raise UserError then: the child has neither this thread nor
        the readers that the index may wait for.
        """
        self._check_process()
        self._process = os.getpid()
        self._stopping.clear()
        self._maintainer = threading.Thread(
            target=self._refresh_until_stopped, args=(interval_s,), name="ssd-maintainer", daemon=True
        )
        self._maintainer.start()

    def close(self) -> None:
        """Stop the background thread; wait for its current refresh. Does nothing in a forked child.

        A refresh waits at most `ssd.corpus.tier.READERS_LIMIT_S` for readers.
        """
        if self._maintainer is None or self._is_fork:
            return
        self._stopping.set()
        self._wake.set()
        self._maintainer.join()
        self._maintainer = None

    @property
    def nbytes(self) -> int:
        """Memory in bytes between merges, the learned tables included."""
        return self._index.nbytes + self.learned.nbytes + self.fallback.nbytes + self.live.nbytes

    @property
    def _is_fork(self) -> bool:
        """Whether the maintainer runs in another process, from which this one was forked."""
        return self._maintainer is not None and os.getpid() != self._process

    def _check_process(self) -> None:
        if self._is_fork:
            raise UserError(
                f"this corpus is maintained in process {self._process}, from which this one was forked; "
                "make drafters and corpora in each process"
            )

    def _put(self, item: Text | Forget) -> None:
        self._inbox.append(item)
        self._wake.set()

    def _refresh_until_stopped(self, interval_s: float) -> None:
        if sys.platform == "linux":
            # On other systems, this would affect all threads of the process. A sandbox may refuse it.
            with contextlib.suppress(OSError):
                os.nice(MAINTAINER_NICENESS)
        while not self._stopping.is_set():
            self._wake.wait()
            self._wake.clear()
            pause_s = interval_s
            try:
                self.refresh()
                while self.is_merging and not self._stopping.is_set():
                    self.refresh()
            except Exception:
                # The last view stays valid; the next refresh may have enough memory again.
                logger.exception("merging new requests failed; drafts come from the last view")
                self._wake.set()
                pause_s = RETRY_S
            self._stopping.wait(pause_s)

    def _apply_changes(self) -> None:
        self._read_inbox()
        self._forget()
        self._index.add(self._waiting)
        self._indexed, self._read = self._indexed + self._read, 0
        self._index.step()

    def _read_inbox(self) -> None:
        """Move queued texts and commands to `_waiting` and `_forgets`; remove waiting texts that are forgotten."""
        for _ in range(len(self._inbox)):
            item = self._inbox.popleft()
            if isinstance(item, Text):
                self._waiting.append(item)
                self._read += len(item.tokens)
                continue
            self._forgets.append(item)
            kept = [text for text in self._waiting if not item.covers(text.name, text.time)]
            item.requests += len(self._waiting) - len(kept)
            self.times.forgotten += len(self._waiting) - len(kept)
            self._waiting = deque(kept)

    def _forget(self) -> None:
        """Remove requests from the index, and erase counted tokens: it is not recorded which requests they are from."""
        if any(forget.name != NO_NAME or forget.before > self.fallback.since for forget in self._forgets):
            self.fallback.erase(self.clock())
        if self._forgets:
            self._index.forget(self._forgets)
            self._forgets = []
