"""Finished requests and an index over them that queries read without waiting.

The index has tiers, so that text becomes draftable soon and at a bounded cost: `recent` takes finished requests
within milliseconds; when it is full it is frozen and merged into `base`, a slice at a time, and what is too old is left
out in the same pass. Queries read an immutable view of all tiers. Knows nothing of how drafts are chosen.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ssd.live import LiveTier
from ssd.match import TIER_TEXT
from ssd.merge import Merge, add_sorted
from ssd.odds import Odds
from ssd.ring import SEPARATOR, Ring, check_tokens
from ssd.tier import Order, Tier, empty_order

logger = logging.getLogger(__name__)

BASE, FROZEN, RECENT, LIVE = range(4)
"""Rows of a view's tiers, oldest text first."""
TIERS = 4

GAP_PART = 16
"""The ring has this part of the capacity in excess, for text that came since the oldest was last left out."""
LEAST_GAP = 1 << 16
LIVE_BLOCKS = 4096

END = np.array([SEPARATOR], np.uint32)


@dataclass(frozen=True, eq=False)
class View:
    """One state of the index. Whoever holds it keeps what it refers to from being overwritten."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    """As kernels take them: tiers, int64 [TIERS, 3], see `ssd.match`; whose the blocks of the live tier are, int64; and
    of the ring the address, first and last + 1 position remembered, and slots, int64 [4]."""
    orders: tuple[Order, ...]
    """What the addresses point to."""
    frame: np.ndarray
    """int64: addresses and lengths of the first two arrays, then the third: what a step is handed."""


@dataclass
class MergeTimes:
    """What the maintainer has done so far."""

    merges: int = 0
    """Times that finished requests became draftable."""
    base_merges: int = 0
    full_builds: int = 0
    last_s: float = 0.0
    longest_s: float = 0.0


class Corpus:
    """A ring of finished requests, and the newest view of its index. Any thread may use it."""

    def __init__(self, capacity: int, depth: int) -> None:
        """`depth`: most context tokens that are matched. Raises ValueError for a capacity that a ring cannot have."""
        self.capacity, self._depth = capacity, depth
        self._gap = max(capacity // GAP_PART, LEAST_GAP)
        self._ring = Ring(capacity + self._gap)
        self._base = Tier(self._ring.capacity)
        self._recent, self._other_recent = Tier(self._gap), Tier(self._gap)
        self._frozen = empty_order()
        self._merge: Merge | None = None
        self._oldest = 0
        self._live = LiveTier(LIVE_BLOCKS, depth)
        self._pending: deque[np.ndarray] = deque()
        self._owners = itertools.count()
        self._news: deque[Callable[[LiveTier], None]] = deque()
        self._running = 0
        self.odds = Odds()
        self.times = MergeTimes()
        self._working = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._maintainer: threading.Thread | None = None
        self._view = self._show()

    @property
    def view(self) -> View:
        """The newest view. Hold it while reading, and not for longer: its memory is written again when it is let go."""
        return self._view

    @property
    def tokens(self) -> int:
        """Tokens remembered, separators included."""
        return len(self._ring)

    @property
    def shown(self) -> int:
        """How many tokens of all that were ever appended the newest view shows, separators included."""
        return int(self._view.arrays[2][2])

    @property
    def is_merging(self) -> bool:
        """Whether a merge into the base is under way; each `refresh` does a slice of it."""
        return self._merge is not None

    def append(self, tokens: np.ndarray, request: str | None = None) -> None:
        """Remember one request, uint32 [N], under a name; what the maintainer shows from now on holds it.

        Raises ValueError if an id is the separator's.
        """
        check_tokens(tokens)
        if len(tokens):
            self._pending.append(tokens)
            self._wake.set()

    @property
    def watches_running(self) -> bool:
        """Whether what running requests produce is worth telling: somebody else runs who could draft it."""
        return self._running > 1

    def begin(self, lead: np.ndarray) -> int:
        """A request begins to run behind the tokens `lead`, uint32; returns its number while it runs."""
        owner = next(self._owners)
        self._running += 1
        self._news.append(lambda live: live.start(owner, lead))
        return owner

    def extend(self, owners: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Running requests produced tokens: `owners[i]`, int64, `tokens[offsets[i]:offsets[i + 1]]`, uint32."""
        self._news.append(lambda live: live.extend_all(owners, tokens, offsets))
        self._wake.set()

    def end(self, owner: int) -> None:
        """A running request has ended."""
        self._running -= 1
        self._news.append(lambda live: live.finish(owner))

    def refresh(self) -> None:
        """Make everything that came so far draftable, now."""
        with self._working:
            self._read_news()
            while self._pending:
                self._take()
                # The view that is held here would keep the next merge waiting for itself.
                self._view = self._show()
            self._live.merge()
            self._step_merge()
            self._view = self._show()

    def maintain(self, interval_s: float) -> None:
        """Refresh whenever something came, at most once in an interval, in a thread of its own."""
        self._maintainer = threading.Thread(
            target=self._refresh_until_stopped, args=(interval_s,), name="ssd-maintainer", daemon=True
        )
        self._maintainer.start()

    def close(self) -> None:
        """Stop the maintainer; returns once what it is doing has ended."""
        self._stopping.set()
        self._wake.set()
        if self._maintainer is not None:
            self._maintainer.join()
            self._maintainer = None

    def _refresh_until_stopped(self, interval_s: float) -> None:
        while not self._stopping.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                self.refresh()
                while self._merge is not None and not self._stopping.is_set():
                    self.refresh()
            except Exception:
                # The last view still serves; a moment later there may be memory for the next one.
                logger.exception("merging new requests failed; drafts come from the last view")
            self._stopping.wait(interval_s)

    def _read_news(self) -> None:
        for _ in range(len(self._news)):
            self._news.popleft()(self._live)

    def _take(self) -> None:
        """Write pending requests into the ring and merge their positions into the recent order."""
        most = self._gap // 4
        texts, size = [], 0
        while self._pending and size + len(self._pending[0]) < most:
            texts.append(self._pending.popleft())
            size += len(texts[-1]) + 1
        if not texts:
            # A piece of a very long request; the next piece repeats enough of it to be matched across the cut.
            long = self._pending.popleft()
            self._pending.appendleft(long[most - 1 - self._depth :])
            texts, size = [long[: most - 1]], most
        while self._ring.free < size or len(self._recent.order) + size > self._gap:
            self._finish_merge()
        first = self._ring.head
        for text in texts:
            self._ring.write(text)
            self._ring.write(END)
        add_sorted(self._recent, self._ring, first, self._depth)
        self.times.merges += 1
        if self._merge is None and len(self._recent.order) >= self._gap // 4:
            self._start_merge()

    def _start_merge(self) -> None:
        self._frozen = self._recent.order
        self._recent, self._other_recent = self._other_recent, self._recent
        oldest = max(self._oldest, self._ring.head - self.capacity)
        # The keys of the oldest positions would read what is to be overwritten.
        alive_from = oldest + self._depth if oldest > 0 else 0
        self._merge = Merge(self._base, self._frozen, self._ring, alive_from, self._depth)
        self._next_oldest = oldest

    def _step_merge(self) -> None:
        if self._merge is None or not self._merge.step():
            return
        self._merge, self._frozen = None, empty_order()
        self._other_recent.replace(empty_order())
        self._oldest = self._next_oldest
        self._view = self._show()
        self._base.wait_until_unread()
        self._ring.oldest = self._oldest
        self._base.release()
        self.times.base_merges += 1

    def _finish_merge(self) -> None:
        if self._merge is None:
            self._start_merge()
        while self._merge is not None:
            self._step_merge()

    def _show(self) -> View:
        orders = (self._base.order, self._frozen, self._recent.order, self._live.tier.order)
        tiers = np.array([(self._ring.address, order.address, len(order)) for order in orders], np.int64)
        tiers[LIVE, TIER_TEXT] = self._live.address
        ring = np.array([self._ring.address, self._oldest, self._ring.head, self._ring.capacity], np.int64)
        owners = self._live.owners
        frame = np.array([tiers.ctypes.data, len(tiers), owners.ctypes.data, len(owners), *ring.tolist()], np.int64)
        return View((tiers, owners, ring), orders, frame)

    @property
    def nbytes(self) -> int:
        """Memory that is held at rest, the odds included."""
        written = min(self._ring.head, self._ring.capacity) * 4
        return written + self._base.nbytes + 2 * self._recent.nbytes + self._live.nbytes + self.odds.nbytes
