"""Finished requests and what runs, and an index over them that queries read without waiting.

Callers leave what they have to say in an inbox; a maintainer thread reads it and brings the index up to date. Knows
nothing of how drafts are chosen.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ssd.config import DrafterConfig
from ssd.corpus.index import Index, MergeTimes, State
from ssd.corpus.live import LiveTier
from ssd.corpus.requests import Forget, Text, hash_of
from ssd.corpus.ring import check_tokens
from ssd.corpus.view import View
from ssd.kernels.odds import Odds

logger = logging.getLogger(__name__)


class Corpus:
    """A ring of finished requests, and the newest view of its index. Any thread may use it."""

    def __init__(self, capacity: int, depth: int, clock: Callable[[], float] = time.time) -> None:
        """`depth`: most context tokens that are matched. `clock`: the time in seconds, that requests are dated by.

        Raises ValueError for a capacity that a ring cannot have.
        """
        self.capacity, self.depth = capacity, depth
        self.clock = clock
        self._index = Index(capacity, depth)
        self._inbox: deque[Text | Forget] = deque()
        self._waiting: deque[Text] = deque()
        self._owners = itertools.count()
        self._news: deque[Callable[[LiveTier], None]] = deque()
        self._running = 0
        self._appended = self._taken = self._coming = 0
        self._counting = threading.Lock()
        self.odds = Odds()
        self._working = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._maintainer: threading.Thread | None = None

    @classmethod
    def from_config(cls, config: DrafterConfig, clock: Callable[[], float] = time.time) -> Corpus:
        """Make an empty corpus of a configuration's capacity and match depth."""
        return cls(config.capacity, config.match_depth, clock)

    @property
    def view(self) -> View:
        """The newest view. Hold it while reading, and not for longer: its memory is written again when it is let go."""
        return self._index.view

    @property
    def tokens(self) -> int:
        """Tokens remembered, separators included."""
        return len(self._index.ring)

    @property
    def requests(self) -> int:
        """Requests that lie in the ring; pieces of very long ones count each."""
        return len(self._index.log)

    def names(self) -> np.ndarray:
        """The hashes of the names of all requests in the ring, int64 [requests], see `ssd.corpus.requests.hash_of`."""
        return self._index.log.rows["name"].copy()

    def named(self) -> dict[int, float]:
        """The same hashes, each with when a request of that name came last."""
        rows = self._index.log.rows
        return dict(zip(rows["name"].tolist(), rows["time"].tolist(), strict=True))

    @property
    def shown(self) -> int:
        """How many tokens of all that were ever appended the newest view shows, separators included."""
        return int(self.view.arrays[2][2])

    @property
    def appended(self) -> int:
        """Tokens that were ever appended."""
        return self._appended

    @property
    def waiting(self) -> int:
        """Tokens that were appended and are not in the index yet. Who appends much at once should wait for them."""
        return self._appended - self._taken

    @property
    def is_merging(self) -> bool:
        """Whether a merge into the base is under way; each `refresh` does a slice of it."""
        return self._index.is_merging

    @property
    def times(self) -> MergeTimes:
        """What the maintainer has done so far."""
        return self._index.times

    def append(self, tokens: np.ndarray, request_id: str | None = None, *, time: float | None = None) -> None:
        """Remember a copy of one request, uint32 [N], under a name; what the maintainer shows from now on holds it.

        time: when it finished, by the clock, if that is not now. Raises ValueError for another dtype or shape, or if an
        id is the separator's.
        """
        check_tokens(tokens)
        if len(tokens):
            with self._counting:
                self._appended += len(tokens)
            self._put(Text(tokens.copy(), hash_of(request_id), self.clock() if time is None else time))

    def forget(self, request_id: str) -> None:
        """Forget what was appended under a name so far; after the next `refresh` no draft or snapshot holds it.

        Snapshots that were saved before keep it: save again. What still runs is for its drafter to forget.
        """
        self._put(Forget(name=hash_of(request_id)))

    def forget_older_than(self, age_s: float) -> None:
        """Forget what was appended more than `age_s` seconds ago, as `forget`."""
        self._put(Forget(before=self.clock() - age_s))

    @property
    def watches_running(self) -> bool:
        """Whether what running requests produce is worth telling: somebody else runs who could draft it."""
        return self._running > 1

    def begin(self, lead: np.ndarray | None) -> int:
        """A request begins to run behind the tokens `lead`, uint32; returns its number while it runs.

        Without a lead nobody is shown what it produces.
        """
        owner = next(self._owners)
        with self._counting:
            self._running += 1
        if lead is not None:
            own_lead = lead.copy()
            self._tell(lambda live: live.start(owner, own_lead))
        return owner

    def extend(self, owners: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Running requests produced tokens: `owners[i]`, int64, `tokens[offsets[i]:offsets[i + 1]]`, uint32."""
        # Copies: the maintainer reads them later, when the caller may have written into its arrays again.
        own_owners, own_tokens, own_offsets = owners.copy(), tokens.copy(), offsets.copy()
        self._tell(lambda live: live.extend_all(own_owners, own_tokens, own_offsets))

    def skip(self, owner: int, lead: np.ndarray) -> None:
        """A running request produced tokens that were not told; `lead`, uint32: the last of them."""
        own_lead = lead.copy()
        self._tell(lambda live: live.skip(owner, own_lead))

    def hide(self, owner: int) -> None:
        """From the next `refresh` on nobody is shown any more what a request produced, though it runs on."""
        self._tell(lambda live: live.finish(owner))

    def end(self, owner: int) -> None:
        """A running request has ended."""
        with self._counting:
            self._running -= 1
        self.hide(owner)

    def refresh(self) -> None:
        """Make everything that came so far draftable, and forget what is to be forgotten, now."""
        with self._working:
            if not (self._news or self._inbox or self._waiting or self._index.is_merging):
                return
            began = time.perf_counter()
            self._read_news()
            # Kept where it outlives a merge that fails.
            self._coming += self._read_inbox()
            self._index.take(self._waiting)
            self._taken, self._coming = self._taken + self._coming, 0
            self._index.live.merge()
            self._index.step()
            self.times.note(time.perf_counter() - began)

    def state(self) -> State:
        """What finished requests the index holds now. While the state is held, none of it is overwritten."""
        with self._working:
            return self._index.state()

    def restore(self, text: np.ndarray, order: np.ndarray, covered: int, rows: np.ndarray) -> None:
        """Begin with what another corpus held, see `Index.restore`. Only for a corpus that nothing was appended to."""
        with self._working:
            self._index.restore(text, order, covered, rows)

    def maintain(self, interval_s: float) -> None:
        """Refresh whenever something came, at most once in an interval, in a thread of its own, until `close`."""
        self._stopping.clear()
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

    @property
    def nbytes(self) -> int:
        """Memory that is held at rest, the odds included."""
        return self._index.nbytes + self.odds.nbytes

    def _put(self, item: Text | Forget) -> None:
        self._inbox.append(item)
        self._wake.set()

    def _tell(self, news: Callable[[LiveTier], None]) -> None:
        # Even what waits for more is read soon: nothing may pile up.
        self._news.append(news)
        self._wake.set()

    def _refresh_until_stopped(self, interval_s: float) -> None:
        while not self._stopping.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                self.refresh()
                while self.is_merging and not self._stopping.is_set():
                    self.refresh()
            except Exception:
                # The last view still serves; a moment later there may be memory for the next one.
                logger.exception("merging new requests failed; drafts come from the last view")
            self._stopping.wait(interval_s)

    def _read_news(self) -> None:
        for _ in range(len(self._news)):
            self._news.popleft()(self._index.live)

    def _read_inbox(self) -> int:
        """Sort what came into texts that wait to be taken and requests to forget, which go first.

        Returns how many tokens came, those that are forgotten at once included.
        """
        forgets, came = [], 0
        for _ in range(len(self._inbox)):
            item = self._inbox.popleft()
            if isinstance(item, Text):
                self._waiting.append(item)
                came += len(item.tokens)
                continue
            forgets.append(item)
            kept = [text for text in self._waiting if not item.covers(text.name, text.time)]
            self.times.forgotten += len(self._waiting) - len(kept)
            self._waiting = deque(kept)
        if forgets:
            self._index.forget(forgets)
        return came
