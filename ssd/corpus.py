"""Finished requests and an index over them that queries read without waiting.

Queries read an immutable view. A maintainer thread builds the next view from a copy of the ring
beside it, at an interval, and swaps one reference. Knows nothing of running requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ssd.ring import Ring

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class View:
    """One state of the corpus and its index; never changes."""

    text: np.ndarray
    """uint32 [N], oldest first."""
    order: np.ndarray
    """uint32 [M], sorted positions of the text; the policy that built them says by what."""
    appended: int
    """Tokens that the ring had ever been given when this view was built."""


class Corpus:
    """A ring of tokens and the newest view of it. Any thread may use it."""

    REST_PER_BUILD = 3.0
    """A large corpus is refreshed less often: the maintainer rests at least this many times as long as it built."""

    def __init__(self, capacity: int, sort: Callable[[np.ndarray], np.ndarray]) -> None:
        """`sort` maps a text, uint32 [N], to its sorted positions, uint32 [M].

        Raises ValueError for a capacity that a ring cannot have.
        """
        self._ring = Ring(capacity)
        self._ring_lock = threading.Lock()
        self._refresh_lock = threading.Lock()
        self._sort = sort
        self._view = self._build(np.empty(0, np.uint32), 0)
        self._build_seconds = 0.0
        self._stopping = threading.Event()
        self._maintainer: threading.Thread | None = None

    @property
    def view(self) -> View:
        """The newest view, for the caller to read as long as it likes."""
        return self._view

    @property
    def tokens(self) -> int:
        """Tokens in the ring, separators included."""
        return len(self._ring)

    @property
    def is_stale(self) -> bool:
        """Whether tokens came since the newest view was built."""
        return self._ring.appended != self._view.appended

    def append(self, tokens: np.ndarray) -> None:
        """Remember one request, uint32 [N]; views built from now on hold it."""
        with self._ring_lock:
            self._ring.append(tokens)

    def refresh(self) -> None:
        """Build and publish a new view, if tokens came since the last one."""
        with self._refresh_lock:
            if not self.is_stale:
                return
            began = time.perf_counter()
            with self._ring_lock:
                text, appended = self._ring.text(), self._ring.appended
            self._view = self._build(text, appended)
            self._build_seconds = time.perf_counter() - began

    def maintain(self, interval_s: float) -> None:
        """Refresh at an interval from now on, in a thread of its own."""
        self._maintainer = threading.Thread(
            target=self._refresh_until_stopped, args=(interval_s,), name="ssd-maintainer", daemon=True
        )
        self._maintainer.start()

    def close(self) -> None:
        """Stop the maintainer; returns once a build that is under way has ended."""
        self._stopping.set()
        if self._maintainer is not None:
            self._maintainer.join()
            self._maintainer = None

    def _build(self, text: np.ndarray, appended: int) -> View:
        order = self._sort(text)
        for array in (text, order):
            array.flags.writeable = False
        return View(text, order, appended)

    def _refresh_until_stopped(self, interval_s: float) -> None:
        while not self._stopping.wait(max(interval_s, self.REST_PER_BUILD * self._build_seconds)):
            try:
                self.refresh()
            except Exception:
                # The last view still serves; a moment later there may be memory for the next one.
                logger.exception("building the next view failed; drafts come from the last one")
