"""What the clients that draft from a copy of a namespace receive: a snapshot, then every change."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

from drafter_service.stubs import drafter_pb2 as pb
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus

KEPT_TOKENS = 1 << 20
"""Number of tokens of the newest changes that are kept for clients whose connection breaks; others take a snapshot."""
KEPT_CHANGES = 1 << 16
SENT_TOKENS = 1 << 20
"""Number of tokens after which a message is full: 4 MB."""
PART_BYTES = 1 << 20
"""Size of a part of a snapshot."""
SIGN_OF_LIFE_S = 2.0
"""Seconds after which a response without changes is sent."""


class Feed:
    """The newest changes of a namespace, numbered in order. Used by the event loop alone."""

    def __init__(self) -> None:
        self.copy = secrets.token_hex(8)
        """Name of this numbering."""
        self._first = 0
        """Number of the first change that is kept."""
        self._changes: deque[pb.Change] = deque()
        self._tokens = 0
        self._is_new = asyncio.Event()
        self._saving = asyncio.Lock()

    @property
    def end(self) -> int:
        """Number of all changes."""
        return self._first + len(self._changes)

    def add(self, change: pb.Change) -> None:
        """Add a change."""
        self._changes.append(change)
        self._tokens += _size(change)
        while self._tokens > KEPT_TOKENS or len(self._changes) > KEPT_CHANGES:
            self._tokens -= _size(self._changes.popleft())
            self._first += 1
        self._is_new.set()
        self._is_new = asyncio.Event()

    def since(self, position: int) -> list[pb.Change] | None:
        """Return the changes after a position, as many as a message may have; None if some are not kept any more."""
        if not self._first <= position <= self.end:
            return None
        changes, tokens = [], 0
        for at in range(position - self._first, len(self._changes)):
            changes.append(self._changes[at])
            tokens += _size(changes[-1])
            if tokens > SENT_TOKENS:
                break
        return changes

    async def wait(self, timeout_s: float) -> None:
        """Return after the next change, or after the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_new.wait()

    async def responses(
        self, namespace: str, corpus: Corpus, copy: str, position: int
    ) -> AsyncGenerator[pb.FollowResponse, None]:
        """Yield responses without end to a client that has a copy up to a position. Raises SnapshotError.

        namespace: its name. copy: the value of `copy` at the time; if it is another, the client gets a snapshot first.
        """
        changes = self.since(position) if copy == self.copy else None
        response = pb.FollowResponse(namespace=namespace, copy=self.copy)
        while True:
            if changes is None:
                # What is learned while the snapshot is written may be in it, and is sent after it.
                position = self.end
                async for part, is_last in self._snapshot(corpus):
                    response.snapshot = part
                    if is_last:
                        response.position, response.is_current = position, position == self.end
                    yield response
                    response = pb.FollowResponse()
            elif changes or response.copy:
                position += len(changes)
                response.changes.extend(changes)
                response.position, response.is_current = position, position == self.end
                yield response
            else:
                await self.wait(SIGN_OF_LIFE_S)
                if position == self.end:
                    yield pb.FollowResponse(position=position, is_current=True)
            response, changes = pb.FollowResponse(), self.since(position)

    async def _snapshot(self, corpus: Corpus) -> AsyncGenerator[tuple[bytes, bool], None]:
        """Yield the parts of a new snapshot, and whether each is the last one."""
        with tempfile.TemporaryDirectory(prefix="ssd-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "corpus.ssd"
            async with self._saving:  # One at a time, since each takes the time and the room of a save.
                size = await asyncio.to_thread(snapshot.save, corpus, path)
            with path.open("rb") as file:
                path.unlink()
                for first in range(0, size, PART_BYTES):
                    yield await asyncio.to_thread(file.read, PART_BYTES), first + PART_BYTES >= size


def _size(change: pb.Change) -> int:
    return len(change.finished.tokens) // 4
