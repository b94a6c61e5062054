"""Events that wait to be published, in order and bounded: when there are too many, the oldest requests give way."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import NamedTuple

import numpy as np

from drafter_service.replication.events import Dropped, Event, Finished, ForgottenBefore

ENTRY_TOKENS = 1 << 14
"""An entry has no more events than are needed to reach this: a reader is not held up for long by one."""
ENTRY_EVENTS = 256
ENTRIES_AT_ONCE = 16
EVENT_WEIGHT = 64
"""What an event takes beside its tokens, in tokens: its objects in memory."""


class _Waiting(NamedTuple):
    number: int
    event: Event


class Outbox:
    """Only the event loop may use it."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: how many may wait, `EVENT_WEIGHT` for each request included."""
        self._max_tokens = max_tokens
        self._tokens = 0
        self._finished: deque[_Waiting] = deque()
        # Apart, since they are never dropped: they are few, and what is to be forgotten must be.
        self._forgetting: deque[_Waiting] = deque()
        self._next = 0
        self._taken_from: int | None = None
        self._filled = asyncio.Event()
        self._settled = asyncio.Event()
        self.is_overflowing = False
        """Whether requests were dropped since it was last empty."""
        self.dropped_tokens = 0
        """Of all requests that were ever dropped."""

    def put(self, event: Event) -> int:
        """Add an event; its tokens are copied. Returns how many finished requests were dropped for want of room."""
        waiting = _Waiting(self._next, event)
        self._next += 1
        if not isinstance(event, Finished):
            self._forgetting.append(waiting)
            self._filled.set()
            return 0
        if _weight(event) > self._max_tokens:
            self.is_overflowing = True
            self.dropped_tokens += len(event.tokens)
            return 1
        self._finished.append(waiting._replace(event=Finished(event.request, np.array(event.tokens), event.time)))
        self._tokens += _weight(event)
        self._filled.set()
        return self._make_room()

    async def wait(self) -> None:
        """Returns when there is something to take."""
        await self._filled.wait()

    def take(self) -> list[list[Event]]:
        """The oldest events, an entry a list. For `flush` they wait until `settle` is called."""
        self._taken_from = self._oldest_waiting
        entries: list[list[Event]] = []
        while len(entries) < ENTRIES_AT_ONCE and (entry := self._take_entry()):
            entries.append(entry)
        if self._oldest_waiting == self._next:
            self._filled.clear()
            self.is_overflowing = False
        return entries

    def settle(self) -> None:
        """What was taken last has been published."""
        self._taken_from = None
        self._settled.set()
        self._settled.clear()

    async def flush(self) -> None:
        """Returns when all that was put in until now has been published or dropped."""
        end = self._next
        while (self._oldest_waiting if self._taken_from is None else self._taken_from) < end:
            await self._settled.wait()

    @property
    def _oldest_waiting(self) -> int:
        return min(queue[0].number if queue else self._next for queue in (self._finished, self._forgetting))

    def _make_room(self) -> int:
        dropped = 0
        while self._tokens > self._max_tokens:
            self.dropped_tokens += len(self._pop_finished().tokens)
            dropped += 1
        self.is_overflowing |= dropped > 0
        return dropped

    def _pop_finished(self) -> Finished:
        event = self._finished.popleft().event
        assert isinstance(event, Finished)
        self._tokens -= _weight(event)
        return event

    def _take_entry(self) -> list[Event]:
        entry: list[Event] = []
        tokens = 0
        while tokens < ENTRY_TOKENS and len(entry) < ENTRY_EVENTS and (self._finished or self._forgetting):
            forget_from = self._forgetting[0].number if self._forgetting else math.inf
            if self._finished and self._finished[0].number < forget_from:
                finished = self._pop_finished()
                tokens += len(finished.tokens)
                entry.append(finished)
            elif entry and isinstance(self._forgetting[0].event, ForgottenBefore | Dropped):
                # These stand at the head of their entry, so that all entries before it can be trimmed.
                break
            else:
                entry.append(self._forgetting.popleft().event)
        return entry


def _weight(event: Finished) -> int:
    return len(event.tokens) + (len(event.request) >> 2) + EVENT_WEIGHT
