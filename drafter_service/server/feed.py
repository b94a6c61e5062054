"""What the clients that draft from a copy of a namespace receive: a snapshot, then every change."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path

from drafter_service.server.disk import in_thread
from drafter_service.stubs import drafter_pb2 as pb
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.sections import SnapshotError

KEPT_TOKENS = 1 << 20
"""Number of tokens of the newest changes that are kept for clients whose connection breaks; others take a snapshot."""
KEPT_CHANGES = 1 << 16
KEPT_MORE = 8
"""Factor of these numbers while a snapshot is being sent, after which a client needs the changes since it began."""
SENT_TOKENS = 1 << 20
"""Number of tokens after which a message is full: 4 MB."""
PART_BYTES = 1 << 20
"""Size of a part of a snapshot."""
SIGN_OF_LIFE_S = 2.0
"""Seconds after which a response without changes is sent."""


class Feed:
    """The newest changes of a namespace, numbered in order. Used by the event loop alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.copy = secrets.token_hex(8)
        """Name of this numbering."""
        self._first = 0
        """Number of the first change that is kept."""
        self._changes: deque[pb.Change] = deque()
        self._tokens = 0
        self._is_new = asyncio.Event()
        self._saving = asyncio.Lock()
        self._snapshots = 0
        """Number of snapshots that are being sent."""

    @property
    def end(self) -> int:
        """Number of all changes."""
        return self._first + len(self._changes)

    def add(self, change: pb.Change) -> None:
        """Add a change."""
        self._changes.append(change)
        self._tokens += _size(change)
        factor = KEPT_MORE if self._snapshots else 1
        while self._tokens > factor * KEPT_TOKENS or len(self._changes) > factor * KEPT_CHANGES:
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
        began = self._clock()
        changes = self.since(position) if copy == self.copy else None
        response = pb.FollowResponse(namespace=namespace, copy=self.copy)
        while True:
            if changes is None:
                # What is learned while the snapshot is written may be in it, and is sent after it.
                position = self.end
                async for part, is_last in self._snapshot(corpus):
                    response.snapshot = part
                    if is_last:
                        response.position = position
                    yield response
                    response = pb.FollowResponse()
            elif changes or response.copy:
                position += len(changes)
                response.changes.extend(changes)
                response.position = position
            else:
                await self.wait(SIGN_OF_LIFE_S)
                response.position = position
            if response.HasField("position"):
                response.is_current, response.seconds = position == self.end, self._clock() - began
                yield response
            response, changes = pb.FollowResponse(), self.since(position)

    async def _snapshot(self, corpus: Corpus) -> AsyncGenerator[tuple[bytes, bool], None]:
        """Yield the parts of a new snapshot, and whether each is the last one; before them, b"" as a sign of life."""
        self._snapshots += 1
        try:
            with tempfile.TemporaryDirectory(prefix="ssd-", ignore_cleanup_errors=True) as folder:
                path = Path(folder) / "corpus.ssd"
                saving = asyncio.ensure_future(self._save(corpus, path))
                while not saving.done():
                    await asyncio.wait([saving], timeout=SIGN_OF_LIFE_S)
                    if not saving.done():
                        yield b"", False
                size = saving.result()
                with path.open("rb") as file:
                    path.unlink()
                    for first in range(0, size, PART_BYTES):
                        yield await asyncio.to_thread(file.read, PART_BYTES), first + PART_BYTES >= size
        finally:
            self._snapshots -= 1

    async def _save(self, corpus: Corpus, path: Path) -> int:
        """Save a corpus; one at a time, since each takes the time and the room of a save. Callers may be cancelled."""
        async with self._saving:
            if not path.parent.exists():
                raise SnapshotError("nobody waits for it any more")
            return await in_thread(snapshot.save, corpus, path)


def _size(change: pb.Change) -> int:
    return len(change.finished.tokens) // 4
