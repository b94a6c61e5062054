"""The index over the ring: suffix arrays in tiers, and the log of requests.

Tiers bound the cost of new text: `recent` takes finished requests within milliseconds; when it is full it is frozen and
merged into `base`, a slice at a time, and positions that are too old are left out in the same pass. A large amount of
text is sorted from scratch instead. One thread at a time may change an index; any thread may read its newest view.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ssd.corpus.memory import trim_heap
from ssd.corpus.requests import Forget, RequestLog, Text
from ssd.corpus.ring import SEPARATOR, Ring, check_capacity
from ssd.corpus.suffix_array import keep_positions, sort_in_threads, usable_positions
from ssd.corpus.tier import Merge, SuffixArray, Tier, add_sorted, empty_suffix_array
from ssd.corpus.view import View, ViewArrays
from ssd.kernels.arrays import addresses_of

GAP_PART = 16
"""The ring has 1 / 16 more slots than the capacity, for text that is appended before the oldest text is removed."""
MIN_GAP = 1 << 16
"""Minimum number of these additional slots."""
FULL_BUILD_PART = 4
"""New text of more than 1 / 4 of the corpus is sorted together with it: at 16 M tokens the sort takes 3.5 s, a merge of
each million 0.5 s."""
READERS_WAIT_S = 0.005
"""Maximum wait of a refresh for readers of removed text, in seconds. If they take longer, the text is removed later."""
RESTORED_AT_ONCE = 1 << 20

END = np.array([SEPARATOR], np.uint32)


@dataclass
class MergeTimes:
    """Counts of the maintainer's work."""

    merges: int = 0
    """Updates that added finished requests to the index."""
    base_merges: int = 0
    """Merges into the base tier."""
    full_builds: int = 0
    """Sorts of the whole corpus."""
    forgotten: int = 0
    """Requests that were forgotten, or pieces of long ones."""
    dropped: int = 0
    """Requests that were not learned because too many were waiting."""
    on_refresh: Callable[[float], object] = lambda _: None
    """Function that is called with the duration of each refresh that changed something, in seconds."""


class ReplacedError(Exception):
    """Text of a state was overwritten or forgotten since."""


@dataclass(frozen=True, eq=False)
class State:
    """The contents of an index, apart from running requests. Changes of the index do not wait for its readers."""

    positions: np.ndarray
    """uint32 [N]: suffix array of the positions before `covered`, without those whose keys begin before `oldest`. It
    stays unchanged while this array is held."""
    ring: Ring
    oldest: int
    covered: int
    head: int
    """The text is at positions `oldest` to `head` - 1."""
    rows: np.ndarray
    """Rows of the `RequestLog`, a copy; the first may begin before `oldest`."""
    erasures: int
    """The ring's `erasures` when the state was taken."""

    def read(self, first: int, end: int) -> np.ndarray:
        """Return a copy of the tokens at positions `first` to `end` - 1, uint32.

        Raises ReplacedError if newer text may be among them, or any text was forgotten since.
        """
        tokens = self.ring.read(first, end)
        if self.ring.overwritten > first or self.ring.erasures != self.erasures:
            raise ReplacedError
        return tokens


class Index:
    """All tiers, and the newest view of them."""

    def __init__(self, capacity: int, depth: int) -> None:
        """Make an empty index. depth: maximum match length in tokens. Raises ValueError for an impossible capacity."""
        check_capacity(capacity)
        self.capacity, self.depth = capacity, depth
        self.gap = max(capacity // GAP_PART, MIN_GAP)
        self.ring = Ring(capacity + self.gap)
        self.log = RequestLog()
        self.times = MergeTimes()
        self._base = Tier(self.ring.capacity)
        self._recent, self._other_recent = Tier(self.gap), Tier(self.gap)
        self._frozen = empty_suffix_array()
        self._merge: Merge | None = None
        self._merged = (0, 0)
        """Values of `_oldest` and `_covered` after the merge."""
        self._oldest, self._covered = 0, 0
        self._is_removing = False
        """Whether text before `_oldest` is still in the ring because a view may read it."""
        self.view = self._make_view()

    @property
    def is_merging(self) -> bool:
        """Whether a merge into the base tier is in progress; each `step` does a slice of it."""
        return self._merge is not None or self._is_removing

    @property
    def nbytes(self) -> int:
        """Memory in bytes between merges."""
        written = min(self.ring.head, self.ring.capacity) * 4 + self.ring.tags.nbytes * self.ring.has_tags
        arrays = self._base.nbytes + 2 * self._recent.nbytes
        return written + arrays + self.log.nbytes

    def state(self) -> State:
        """Return the current contents."""
        rows, ring = self.log.rows.copy(), self.ring
        return State(self._base.keep(), ring, self._oldest, self._covered, ring.head, rows, ring.erasures)

    def add(self, waiting: deque[Text]) -> None:
        """Add all waiting texts to the index, and remove them from the queue."""
        size = sum(len(text.tokens) + 1 for text in waiting)
        if size > max(self.gap // 4, len(self.ring) // FULL_BUILD_PART):
            self._build(waiting)
            # The waiting texts were many small arrays; the allocator would not return their memory to the system.
            trim_heap()
        while waiting:
            self._add_some(waiting)

    def publish(self) -> None:
        """Publish a view of all changes."""
        self.view = self._make_view()

    def step(self) -> None:
        """Do a slice of the merge in progress, and publish a view of all changes since the last step."""
        self._step_merge()
        self.publish()
        if self._is_removing and self._base.wait_until_unread(READERS_WAIT_S):
            self._remove_old()

    def forget(self, forgets: Sequence[Forget]) -> None:
        """Remove requests from all tiers, and their text from the ring. Waits until the text has no readers."""
        spans = self.log.spans_of(forgets, self.ring.head)
        if len(spans) == 0:
            return
        # The oldest request may be partly overwritten.
        spans = np.maximum(spans, self.ring.head - self.ring.capacity)
        # Adjacent ones together: a list of each would hold the interpreter's lock, and delay the threads that draft.
        cuts = spans[1:, 0] != spans[:-1, 1]
        joined = np.stack((spans[np.append(True, cuts), 0], spans[np.append(cuts, True), 1]), axis=1).tolist()
        self._finish_merge()
        marked = np.zeros(self.ring.capacity, np.uint8)
        for first, end in joined:
            for slots in self.ring.slots_of(first, end):
                marked[slots] = 1
        for tier in (self._base, self._recent):
            tier.publish(_keep(tier, marked))
        self.publish()
        # Every view holds the base tier, so the text has no readers after this.
        self._base.release()
        for first, end in joined:
            self.ring.erase(first, end)
        counts = [forget.count(self.log.rows) for forget in forgets]
        # Last, so that the next call repeats all of it if there was not enough memory.
        self.log.remove(forgets)
        self.times.forgotten += len(spans)
        for forget, count in zip(forgets, counts, strict=True):
            forget.requests += count

    def restore(self, text: np.ndarray, positions: np.ndarray, covered: int, rows: np.ndarray) -> None:
        """Fill an empty index with the contents of another one of the same depth, or the newest tokens of it.

        text: uint32 [N]. positions: uint32 [M], suffix array of the first `covered` tokens; it is not copied before the
        next merge. rows: of the `RequestLog`. Positions count from the first token.
        """
        cut = len(text) - self.capacity if len(text) > self.ring.capacity else 0
        covered = max(covered, cut)
        self.ring.write(text[cut:covered])
        self._covered = covered - cut
        if cut == 0:
            self._base.replace(SuffixArray(positions))
        else:
            self._base.publish(_shift(positions, cut, self.depth, self._base.next_buffer().array))
        rows = rows.copy()
        rows["first"] -= cut
        self.log.replace(rows)
        self.log.drop_before(0)
        self.log.rows["first"][:] = np.maximum(self.log.rows["first"], 0)
        self._restore_tags(len(text) - cut)
        part = self.gap // 4
        for first in range(covered, len(text), part):
            self._write_known(text[first : first + part])
        self.publish()

    def _restore_tags(self, size: int) -> None:
        """Tag the text of rollouts; size: number of tokens of all requests of the log."""
        rows = self.log.rows
        ends = np.append(rows["first"], size)[1:]
        for at in rows["tag"].nonzero()[0].tolist():
            self.ring.tag(int(rows["first"][at]), int(ends[at]), int(rows["tag"][at]))

    def _add_some(self, waiting: deque[Text]) -> None:
        """Write texts into the ring and merge their positions into the recent tier."""
        most = self.gap // 4
        texts, size = [], 0
        for text in waiting:
            if size + len(text.tokens) >= most:
                break
            texts.append(text)
            size += len(text.tokens) + 1
        rest = []
        if not texts:
            # One piece of a very long request; the next piece repeats its end, so that matches cross the cut.
            long = waiting[0]
            texts, size = [long._replace(tokens=long.tokens[: most - 1])], most
            rest = [long._replace(tokens=long.tokens[most - 1 - self.depth :])]
        self._reserve(size)
        with self._written(texts) as first:
            add_sorted(self._recent, self.ring, first, self.depth)
        for _ in texts:
            waiting.popleft()
        waiting.extendleft(rest)
        self._publish_recent()
        self.times.merges += 1

    def _write_known(self, tokens: np.ndarray) -> None:
        """Write tokens that the log already has, and merge their positions into the recent tier."""
        self._reserve(len(tokens))
        first = self.ring.head
        self.ring.write(tokens)
        add_sorted(self._recent, self.ring, first, self.depth)
        self._publish_recent()

    @contextmanager
    def _written(self, texts: Sequence[Text]) -> Iterator[int]:
        """Write texts into the ring and enter a context that must index them; it has the position of the first one.

        If the context raises an exception, the texts are removed again, so that the next refresh can repeat all of it.
        """
        first = self.ring.head
        try:
            for text in texts:
                self.log.add(self.ring.head, text.name, text.time, text.tag)
                self.ring.write(text.tokens)
                self.ring.write(END)
                self.ring.tag(self.ring.head - len(text.tokens) - 1, self.ring.head, text.tag)
                self.log.drop_before(self.ring.head - self.ring.capacity)
            yield first
        except BaseException:
            self.ring.head = first
            self.log.drop_from(first)
            raise

    def _reserve(self, size: int) -> None:
        """Make room for `size` tokens in the ring and the recent tier."""
        while self.ring.free < size or len(self._recent.newest) + size > self.gap:
            if not self.is_merging:
                self._start_merge(self._due())
            self._finish_merge()

    def _publish_recent(self) -> None:
        """Publish a view of the recent tier; start to merge it when it is a quarter full."""
        self.publish()
        if not self.is_merging and len(self._recent.newest) >= self.gap // 4:
            self._start_merge(self._due())

    def _build(self, waiting: deque[Text]) -> None:
        """Sort the whole corpus and all waiting texts from scratch."""
        texts = _newest(waiting, self.capacity)
        self._finish_merge()
        oldest = self._due(sum(len(text.tokens) + 1 for text in texts))
        if oldest > self._oldest:
            self._start_merge(oldest)
            self._finish_merge()
        self._recent.wait_for_readers()  # What is replaced below must not fail once the text is in the base tier.
        ring, first, into = self.ring, self._readable_from(oldest), self._base.next_buffer().address
        with self._written(texts):
            size = usable_positions(ring.address, first % ring.capacity, ring.head - first, ring.capacity, into)
            sort_in_threads(ring.address, into, size, self.depth)
            self._base.publish(size)
        waiting.clear()
        self._recent.replace(empty_suffix_array())
        self._covered = ring.head
        self.publish()
        self._base.release()
        self.times.merges += 1
        self.times.full_builds += 1

    def _due(self, more: int = 0) -> int:
        """Return the oldest position that is remembered once `more` further tokens are written."""
        return max(self._oldest, self.ring.head + more - self.capacity)

    def _readable_from(self, oldest: int) -> int:
        """Return the first position whose key does not reach into removed text."""
        return oldest + self.depth if oldest > 0 else 0

    def _start_merge(self, oldest: int) -> None:
        added = self._recent.newest
        self._merge = Merge(self._base, added, self.ring, self._readable_from(oldest), self.depth)
        self._frozen = added
        self._recent, self._other_recent = self._other_recent, self._recent
        self._merged = oldest, self.ring.head

    def _finish_merge(self) -> None:
        """Finish the merge in progress, if there is one. Waits until the removed text has no readers."""
        while self._merge is not None:
            self._step_merge()
        if self._is_removing:
            self._remove_old()

    def _step_merge(self) -> None:
        """Do a slice of the merge in progress, if there is one, and publish the result of the last one."""
        if self._merge is None:
            return
        self._other_recent.wait_for_readers()  # What is replaced below must not fail once the merge is complete.
        if not self._merge.step():
            return
        self._is_removing = True  # First, since other threads read `is_merging`.
        self._merge, self._frozen = None, empty_suffix_array()
        self._other_recent.replace(empty_suffix_array())
        self._oldest, self._covered = self._merged
        self.times.base_merges += 1
        self.publish()

    def _remove_old(self) -> None:
        """Allow text before the oldest position to be overwritten; waits until it has no readers."""
        self._base.release()
        self.ring.oldest = self._oldest
        self._is_removing = False

    def _make_view(self) -> View:
        suffix_arrays = (self._base.newest, self._frozen, self._recent.newest)
        ages = (self.ring.head - 1) % self.ring.capacity, self.ring.capacity
        tiers = np.array([(self.ring.address, each.address, len(each), *ages) for each in suffix_arrays], np.int64)
        ring = np.array([self.ring.address, self._oldest, self.ring.head, self.ring.capacity], np.int64)
        arrays = ViewArrays(tiers, ring, self.ring.tags)
        return View(arrays, suffix_arrays, addresses_of(arrays, len(arrays.tags)))


def _keep(tier: Tier, marked: np.ndarray) -> int:
    """Copy a tier's positions whose slot is not marked into its next buffer; return their number."""
    buffer = tier.next_buffer()
    return int(keep_positions(tier.newest.address, len(tier.newest), marked, buffer.address))


def _newest(waiting: Sequence[Text], room: int) -> list[Text]:
    """Return the newest texts that fit into `room` tokens, separators included; the first may be cut at its start."""
    texts: list[Text] = []
    for text in reversed(waiting):
        if room < 2:
            break
        texts.append(text._replace(tokens=text.tokens[-min(len(text.tokens), room - 1) :]))
        room -= len(texts[-1].tokens) + 1
    return texts[::-1]


def _shift(positions: np.ndarray, cut: int, depth: int, into: np.ndarray) -> int:
    """Write the positions whose keys do not reach into the first `cut` tokens, less `cut`; return their number."""
    size = 0
    for first in range(0, len(positions), RESTORED_AT_ONCE):
        part = positions[first : first + RESTORED_AT_ONCE]
        part = part[part >= cut + depth] - np.uint32(cut)
        into[size : size + len(part)] = part
        size += len(part)
    return size
