"""What came lately: so that a request is learned once, and not after it was forgotten.

Entries come twice when the answer to a writer was lost, and a replica that was cut off may publish a request after
another has forgotten it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from drafter_service.replication.counters import LogCounters
from drafter_service.replication.events import Dropped, Event, Finished, Forgotten, ForgottenBefore
from ssd.corpus.requests import NO_NAME, hash_of

NAMES_KEPT = 1 << 16
"""About 10 MB when full. What comes twice does so within what a replica's outbox holds: some thousand requests."""


class Recent:
    """The last names that were learned and forgotten, as hashes."""

    def __init__(self, counters: LogCounters, known: Iterable[int] = ()) -> None:
        """`known`: hashes of names that were learned already, see `ssd.corpus.requests.hash_of`, the newest last."""
        self._counters = counters
        self._learned: OrderedDict[int, None] = OrderedDict()
        self._forgotten: OrderedDict[int, float] = OrderedDict()
        self._before = -math.inf
        for name in known:
            self._learn(name)

    def passes(self, event: Event) -> bool:
        """Whether an event that was read is news; from now on it is none."""
        match event:
            case Finished(request=request, time=time):
                return self._is_news(hash_of(request or None), time)
            case Forgotten(request=request, time=time):
                name = hash_of(request)
                self._learned.pop(name, None)
                self._forgotten[name] = max(time, self._forgotten.pop(name, time))
                _shorten(self._forgotten)
            case ForgottenBefore(time=time):
                self._before = max(self._before, time)
            case Dropped(time=time):
                self._before = max(self._before, time)
                self._learned.clear()
        return True

    def _is_news(self, name: int, time: float) -> bool:
        if time < self._before or time <= self._forgotten.get(name, -math.inf):
            self._counters.outdated += 1
            return False
        if name in self._learned:
            self._learned.move_to_end(name)
            self._counters.duplicates += 1
            return False
        self._learn(name)
        return True

    def _learn(self, name: int) -> None:
        if name != NO_NAME:
            self._learned[name] = None
            _shorten(self._learned)


def _shorten(names: OrderedDict[int, None] | OrderedDict[int, float]) -> None:
    if len(names) > NAMES_KEPT:
        names.popitem(last=False)
