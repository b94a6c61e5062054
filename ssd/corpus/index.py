"""The ring, the orders over it and the log of its requests: everything that changes them.

The index has tiers, so that text becomes draftable soon and at a bounded cost: `recent` takes finished requests
within milliseconds; when it is full it is frozen and merged into `base`, a slice at a time, and what is too old is left
out in the same pass. Much text at once is sorted from scratch instead. One thread at a time may change an index; any
thread may read its newest view. Knows nothing of how drafts are chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ssd.corpus.live import LiveTier
from ssd.corpus.memory import trim_heap
from ssd.corpus.merge import Merge, add_sorted
from ssd.corpus.requests import Forget, RequestLog, Text
from ssd.corpus.ring import SEPARATOR, Ring, check_capacity
from ssd.corpus.suffix_array import keep_positions, usable_positions
from ssd.corpus.threads import sort_in_threads
from ssd.corpus.tier import Order, Tier, empty_order
from ssd.corpus.view import LIVE, View
from ssd.kernels.match import TIER_TEXT

GAP_PART = 16
"""The ring has this part of the capacity in excess, for text that came since the oldest was last left out."""
LEAST_GAP = 1 << 16
LIVE_BLOCKS = 4096
FULL_BUILD_PART = 4
"""More new text than this part of what is remembered is sorted together with it: at 16 M tokens the sort takes 3.5 s,
and a merge of every million 0.5 s."""
PATIENCE_S = 0.005
"""How long newer text waits for readers of what is left out. They keep only the memory, while there is room."""
RESTORED_AT_ONCE = 1 << 20

END = np.array([SEPARATOR], np.uint32)


@dataclass
class MergeTimes:
    """What the maintainer has done so far."""

    merges: int = 0
    """Times that finished requests became draftable."""
    base_merges: int = 0
    full_builds: int = 0
    forgotten: int = 0
    """Requests, or pieces of long ones."""
    last_s: float = 0.0
    longest_s: float = 0.0
    """Of the refreshes in which something was done."""
    heard: Callable[[float], object] = lambda _: None
    """Told how many seconds each of them took."""

    def note(self, seconds: float) -> None:
        """A refresh took so long."""
        self.last_s, self.longest_s = seconds, max(self.longest_s, seconds)
        self.heard(seconds)


@dataclass(frozen=True, eq=False)
class State:
    """What an index holds, apart from running requests. While it is held, none of it is overwritten."""

    base: Order
    """The positions before `covered`, except for those whose keys would reach back before `oldest`."""
    ring: Ring
    oldest: int
    covered: int
    head: int
    """The text lies at the positions from `oldest` up to and without `head`."""
    rows: np.ndarray
    """Of the `RequestLog`, a copy; the first may begin before `oldest`."""


class Index:
    """All tiers and the newest view of them."""

    def __init__(self, capacity: int, depth: int) -> None:
        """`depth`: most context tokens that are matched. Raises ValueError for a capacity that a ring cannot have."""
        check_capacity(capacity)
        self.capacity, self.depth = capacity, depth
        self.gap = max(capacity // GAP_PART, LEAST_GAP)
        self.ring = Ring(capacity + self.gap)
        self.log = RequestLog()
        self.live = LiveTier(LIVE_BLOCKS, depth)
        self.times = MergeTimes()
        self._base = Tier(self.ring.capacity)
        self._recent, self._other_recent = Tier(self.gap), Tier(self.gap)
        self._frozen = empty_order()
        self._merge: Merge | None = None
        self._merged = (0, 0)
        """`_oldest` and `_covered` once the merge is done."""
        self._oldest, self._covered = 0, 0
        self._is_leaving = False
        """Whether text before `_oldest` is still in the ring, for those who read it."""
        self.view = self._show()

    @property
    def is_merging(self) -> bool:
        """Whether a merge into the base is under way; each `step` does a slice of it."""
        return self._merge is not None or self._is_leaving

    @property
    def nbytes(self) -> int:
        """Memory that is held at rest."""
        written = min(self.ring.head, self.ring.capacity) * 4
        orders = self._base.nbytes + 2 * self._recent.nbytes
        return written + orders + self.live.nbytes + self.log.nbytes

    def state(self) -> State:
        """What is held now."""
        rows = self.log.rows.copy()
        return State(self._base.order, self.ring, self._oldest, self._covered, self.ring.head, rows)

    def take(self, waiting: deque[Text]) -> None:
        """Make texts draftable, all that wait."""
        size = sum(len(text.tokens) + 1 for text in waiting)
        if size > max(self.gap // 4, len(self.ring) // FULL_BUILD_PART):
            self._build(waiting)
            # What waited was much, in small pieces; the allocator would keep it.
            trim_heap()
        while waiting:
            self._take_some(waiting)

    def step(self) -> None:
        """Do a slice of the merge that is under way, and show what came of everything since the last step."""
        if self._merge is not None and self._merge.step():
            self._adopt()
        self.view = self._show()
        if self._is_leaving and self._base.wait_until_unread(PATIENCE_S):
            self._leave()

    def forget(self, forgets: Sequence[Forget]) -> None:
        """Take requests out of all orders, and their text out of the ring. Waits for those who read it."""
        spans = self.log.take(forgets, self.ring.head)
        if len(spans) == 0:
            return
        # The oldest may be overwritten in part.
        spans = np.maximum(spans, self.ring.head - self.ring.capacity)
        self._finish_merge()
        marked = np.zeros(self.ring.capacity, np.uint8)
        for first, end in spans.tolist():
            for slots in self.ring.slots_of(first, end):
                marked[slots] = 1
        for tier in (self._base, self._recent):
            tier.publish(_keep(tier, marked))
        self.view = self._show()
        # All views hold the base, so nobody who could read the text is left.
        self._base.release()
        for first, end in spans.tolist():
            self.ring.erase(first, end)
        self.times.forgotten += len(spans)

    def restore(self, text: np.ndarray, order: np.ndarray, covered: int, rows: np.ndarray) -> None:
        """Begin with what another index of the same depth held; only the newest if that is too much.

        text: uint32 [N]. order: uint32 [M], of the first `covered` tokens; it is read where it lies until the next
        merge. rows: of the `RequestLog`. Positions count from the first token.
        """
        cut = len(text) - self.capacity if len(text) > self.ring.capacity else 0
        covered = max(covered, cut)
        self.ring.write(text[cut:covered])
        self._covered = covered - cut
        if cut == 0:
            self._base.replace(Order(order))
        else:
            self._base.publish(_shift(order, cut, self.depth, self._base.next_buffer().array))
        rows = rows.copy()
        rows["first"] -= cut
        self.log.replace(rows)
        self.log.drop_before(0)
        self.log.rows["first"][:] = np.maximum(self.log.rows["first"], 0)
        part = self.gap // 4
        for first in range(covered, len(text), part):
            self._write_known(text[first : first + part])
        self.view = self._show()

    def _take_some(self, waiting: deque[Text]) -> None:
        """Write texts into the ring and merge their positions into the recent order."""
        most = self.gap // 4
        texts, size = [], 0
        while waiting and size + len(waiting[0].tokens) < most:
            texts.append(waiting.popleft())
            size += len(texts[-1].tokens) + 1
        if not texts:
            # A piece of a very long request; the next piece repeats enough of it to be matched across the cut.
            long = waiting.popleft()
            waiting.appendleft(long._replace(tokens=long.tokens[most - 1 - self.depth :]))
            texts, size = [long._replace(tokens=long.tokens[: most - 1])], most
        self._reserve(size)
        first = self.ring.head
        for text in texts:
            self._write(text)
        self._add(first)
        self.times.merges += 1

    def _write_known(self, tokens: np.ndarray) -> None:
        """Write tokens that the log knows already, and merge their positions into the recent order."""
        self._reserve(len(tokens))
        first = self.ring.head
        self.ring.write(tokens)
        self._add(first)

    def _write(self, text: Text) -> None:
        self.log.add(self.ring.head, text.name, text.time)
        self.ring.write(text.tokens)
        self.ring.write(END)
        self.log.drop_before(self.ring.head - self.ring.capacity)

    def _reserve(self, size: int) -> None:
        """Make room for so many tokens in the ring and the recent order."""
        while self.ring.free < size or len(self._recent.order) + size > self.gap:
            if not self.is_merging:
                self._start_merge(self._due())
            self._finish_merge()

    def _add(self, first: int) -> None:
        """Show the text from `first` on."""
        add_sorted(self._recent, self.ring, first, self.depth)
        self.view = self._show()
        if not self.is_merging and len(self._recent.order) >= self.gap // 4:
            self._start_merge(self._due())

    def _build(self, waiting: deque[Text]) -> None:
        """Sort all that is remembered and all that waits from scratch."""
        texts = _newest(waiting, self.capacity)
        waiting.clear()
        self._finish_merge()
        oldest = self._due(sum(len(text.tokens) + 1 for text in texts))
        if oldest > self._oldest:
            self._start_merge(oldest)
            self._finish_merge()
        for text in texts:
            self._write(text)
        ring, first, into = self.ring, self._readable_from(oldest), self._base.next_buffer().address
        size = usable_positions(ring.address, first % ring.capacity, ring.head - first, ring.capacity, into)
        sort_in_threads(ring.address, into, size, self.depth)
        self._base.publish(size)
        self._recent.replace(empty_order())
        self._covered = ring.head
        self.view = self._show()
        self._base.release()
        self.times.merges += 1
        self.times.full_builds += 1

    def _due(self, more: int = 0) -> int:
        """The oldest position to be remembered once there are so many tokens more."""
        return max(self._oldest, self.ring.head + more - self.capacity)

    def _readable_from(self, oldest: int) -> int:
        """The first position whose key does not read what is overwritten."""
        return oldest + self.depth if oldest > 0 else 0

    def _start_merge(self, oldest: int) -> None:
        self._frozen = self._recent.order
        self._recent, self._other_recent = self._other_recent, self._recent
        self._merge = Merge(self._base, self._frozen, self.ring, self._readable_from(oldest), self.depth)
        self._merged = oldest, self.ring.head

    def _finish_merge(self) -> None:
        """Finish the merge that is under way, if one is. Waits for those who read what it leaves out."""
        while self._merge is not None:
            if self._merge.step():
                self._adopt()
        if self._is_leaving:
            self._leave()

    def _adopt(self) -> None:
        """Show what the merge came to."""
        self._merge, self._frozen = None, empty_order()
        self._other_recent.replace(empty_order())
        self._oldest, self._covered = self._merged
        self._is_leaving = True
        self.times.base_merges += 1
        self.view = self._show()

    def _leave(self) -> None:
        """Let the text before the oldest be overwritten, once nobody reads it."""
        self._base.release()
        self.ring.oldest = self._oldest
        self._is_leaving = False

    def _show(self) -> View:
        orders = (self._base.order, self._frozen, self._recent.order, self.live.tier.order)
        tiers = np.array([(self.ring.address, order.address, len(order)) for order in orders], np.int64)
        tiers[LIVE, TIER_TEXT] = self.live.address
        ring = np.array([self.ring.address, self._oldest, self.ring.head, self.ring.capacity], np.int64)
        owners = self.live.owners
        frame = np.array([tiers.ctypes.data, len(tiers), owners.ctypes.data, len(owners), *ring.tolist()], np.int64)
        return View((tiers, owners, ring), orders, frame)


def _keep(tier: Tier, marked: np.ndarray) -> int:
    """Write a tier's positions, but those whose slot is marked, into its next buffer; returns how many."""
    buffer = tier.next_buffer()
    return int(keep_positions(tier.order.address, len(tier.order), marked, buffer.address))


def _newest(waiting: Sequence[Text], room: int) -> list[Text]:
    """The newest texts of so many tokens together, separators included; of the first of them maybe only the end."""
    texts: list[Text] = []
    for text in reversed(waiting):
        if room < 2:
            break
        texts.append(text._replace(tokens=text.tokens[-min(len(text.tokens), room - 1) :]))
        room -= len(texts[-1].tokens) + 1
    return texts[::-1]


def _shift(order: np.ndarray, cut: int, depth: int, into: np.ndarray) -> int:
    """Write the positions that do not read the first `cut` tokens, counted from there on; returns how many."""
    size = 0
    for first in range(0, len(order), RESTORED_AT_ONCE):
        part = order[first : first + RESTORED_AT_ONCE]
        part = part[part >= cut + depth] - np.uint32(cut)
        into[size : size + len(part)] = part
        size += len(part)
    return size
