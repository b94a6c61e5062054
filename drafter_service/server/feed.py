"""What the clients that draft from a copy of a namespace receive: a snapshot, then every change."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import structlog

from drafter_service.server.disk import in_thread
from drafter_service.stubs import drafter_pb2 as pb
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import NO_NAME, Forget, hash_of
from ssd.corpus.sections import SnapshotError

logger = structlog.get_logger(__name__)

KEPT_BYTES = 1 << 22
"""Size of the newest changes that are kept for clients whose connection breaks; others take a snapshot."""
KEPT_MORE = 8
"""Factor of this size while a snapshot is being sent, after which a client needs the changes since it began."""
CHANGE_BYTES = 1 << 10
"""Memory of a change's objects in addition to its contents: 500 to 1,100 bytes were measured."""
TRIMMED_AT_ONCE = 256
"""Largest number of changes that are dropped when one is added, so that the event loop is not blocked."""
PART_BYTES = 1 << 20
"""Size of a part of a snapshot, and of changes after which a message is full."""
SIGN_OF_LIFE_S = 2.0
"""Seconds after which a response without changes is sent."""


class UnwrittenError(RuntimeError):
    """A snapshot cannot be written now."""


@dataclass(eq=False)
class CopyStream:
    """The state of a stream to a client that drafts from a copy."""

    namespace: str
    copy: str
    """The value of `Feed.copy` when the client got its copy; "" if it has none."""
    position: int
    """Number of changes that were sent to it."""
    max_tokens: int
    """Largest number of tokens of the copy."""
    engine: str
    libraries: list[str]
    """Libraries of the namespace that the client may read."""


class Kept(NamedTuple):
    """A change that is kept."""

    change: pb.Change
    bytes: int
    """Its memory."""
    name: int
    """Hash of the name of the text that was learned; `NO_NAME` for other changes."""
    time: float
    """When it was learned, in seconds since 1970; infinite for other changes."""

    @classmethod
    def of(cls, change: pb.Change) -> Kept:
        """Return what is kept of a change."""
        size, text = CHANGE_BYTES + change.ByteSize(), change.finished
        if not change.HasField("finished"):
            return cls(change, size, NO_NAME, math.inf)
        return cls(change, size, hash_of(text.request_id), text.time)


ERASED = Kept.of(pb.Change())
"""Replaces text that has been forgotten; clients ignore it."""


class Feed:
    """The newest changes of a namespace, numbered in order. Used by the event loop alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.copy = secrets.token_hex(8)
        """Name of this numbering."""
        self._first = 0
        """Number of the first change that is kept."""
        self._changes: deque[Kept] = deque()
        self.nbytes = 0
        """Memory of the changes that are kept."""
        self._is_followed = False
        """Whether a client has followed: until then nothing is kept, since none can continue after a position."""
        self._is_new = asyncio.Event()
        self._savings: dict[int, Saving] = {}
        """The newest snapshots that are being written or sent, by their largest number of tokens."""
        self._sending = 0
        """Number of streams that send a snapshot, or wait for one."""
        self._writing = asyncio.Lock()

    @property
    def end(self) -> int:
        """Number of all changes."""
        return self._first + len(self._changes)

    def add(self, change: pb.Change) -> None:
        """Add a change."""
        self._changes.append(Kept.of(change))
        self.nbytes += self._changes[-1].bytes
        limit = KEPT_BYTES * (KEPT_MORE if self._sending else 1) if self._is_followed else 0
        for _ in range(TRIMMED_AT_ONCE):
            if self.nbytes <= limit:
                break
            self.nbytes -= self._changes.popleft().bytes
            self._first += 1
        self._is_new.set()
        self._is_new = asyncio.Event()

    def forget(self, change: pb.Change, command: Forget) -> None:
        """Add a change that forgets text, and erase the text that its command applies to: it must not be sent later."""
        kept = self._changes
        self._changes = deque(ERASED if command.covers(each.name, each.time) else each for each in kept)
        self.nbytes = sum(each.bytes for each in self._changes)
        self.add(change)

    def since(self, position: int) -> list[pb.Change] | None:
        """Return the changes after a position, as many as a message may have; None if some are not kept any more."""
        if not self._first <= position <= self.end:
            return None
        changes, size = [], 0
        for kept in islice(self._changes, position - self._first, None):
            changes.append(kept.change)
            size += kept.bytes
            if size > PART_BYTES:
                break
        return changes

    async def wait(self, timeout_s: float) -> None:
        """Return after the next change, or after the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_new.wait()

    async def responses(self, corpus: Corpus, stream: CopyStream) -> AsyncGenerator[pb.FollowResponse, None]:
        """Yield responses without end to a client that has a copy up to a position. Raises UnwrittenError.

        stream: with the client's position, which is updated.
        """
        began, self._is_followed = self._clock(), True
        changes = self.since(stream.position) if stream.copy == self.copy else None
        response = pb.FollowResponse(namespace=stream.namespace, copy=self.copy, libraries=stream.libraries)
        while True:
            if changes is None:
                async with aclosing(self._snapshot(corpus, stream.max_tokens)) as parts:
                    async for part, position in parts:
                        response.snapshot = part
                        if position is not None:
                            response.position = stream.position = position
                            stream.copy = self.copy
                        yield response
                        response = pb.FollowResponse()
                response.position = stream.position
            elif changes or response.copy:
                stream.position += len(changes)
                response.changes.extend(changes)
                response.position = stream.position
            else:
                await self.wait(SIGN_OF_LIFE_S)
                response.position = stream.position
            if response.HasField("position"):
                response.is_current, response.seconds = stream.position == self.end, self._clock() - began
                yield response
            response, changes = pb.FollowResponse(), self.since(stream.position)

    async def _snapshot(self, corpus: Corpus, max_tokens: int) -> AsyncGenerator[tuple[bytes, int | None], None]:
        """Yield the parts of a snapshot, with the last one its position; before them, b"" as a sign of life.

        Clients of the same limit that wait at the same time get the same snapshot.
        """
        saving = self._savings.get(max_tokens)
        if saving is None or saving.written.done():
            # What is learned while the snapshot is written may be in it, and is sent after it.
            saving = self._savings[max_tokens] = Saving(self.end)
            saving.written = asyncio.ensure_future(self._write(corpus, max_tokens, saving))
        saving.readers += 1
        self._sending += 1
        try:
            while not saving.written.done():
                await asyncio.wait([saving.written], timeout=SIGN_OF_LIFE_S)
                if not saving.written.done():
                    yield b"", None
            file = saving.written.result()
            last = os.fstat(file.fileno()).st_size - PART_BYTES
            for first in range(0, last + PART_BYTES, PART_BYTES):
                part = await in_thread(os.pread, file.fileno(), PART_BYTES, first)
                yield part, saving.position if first >= last else None
        except (SnapshotError, OSError, MemoryError, RuntimeError) as problem:
            logger.error("copy not sent", reason=str(problem) or type(problem).__name__)
            raise UnwrittenError("the service cannot write a snapshot now") from None
        finally:
            self._sending -= 1
            saving.readers -= 1
            if not saving.readers:
                saving.written.add_done_callback(_close)
                if self._savings.get(max_tokens) is saving:
                    del self._savings[max_tokens]

    async def _write(self, corpus: Corpus, max_tokens: int, saving: Saving) -> IO[bytes]:
        """Return a file with a new snapshot and without a name. One is written at a time, since each takes the time and
        the room of a save. Raises SnapshotError if nobody waits for it any more.
        """

        def write() -> IO[bytes]:
            with tempfile.TemporaryDirectory(prefix="ssd-", ignore_cleanup_errors=True) as folder:
                path = Path(folder) / "corpus.ssd"
                snapshot.save(corpus, path, max_tokens=max_tokens)
                return path.open("rb")

        async with self._writing:
            if not saving.readers:
                raise SnapshotError("nobody waits for the snapshot any more")
            return await in_thread(write)


@dataclass(eq=False)
class Saving:
    """A snapshot that is being written or sent."""

    position: int
    """Number of the changes that it contains for certain."""
    readers: int = 0
    """Number of streams that send it, or wait for it."""
    written: asyncio.Future[IO[bytes]] = field(init=False)


def _close(written: asyncio.Future[IO[bytes]]) -> None:
    if not written.cancelled() and written.exception() is None:
        written.result().close()
