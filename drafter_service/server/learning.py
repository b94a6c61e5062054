"""Learning and forgetting at the rate of the index: callers with much text wait, so that memory does not fill up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from drafter_service.server.namespace import ClosedError, Namespace
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.messages import read_texts

POLL_S = 0.005
"""Interval at which the length of the index's queue is read."""
TEXTS_PER_TURN = 256
"""Texts that are learned before other tasks of the event loop run."""


@dataclass(frozen=True)
class Learned:
    """How much was learned."""

    tokens: int = 0
    texts: int = 0
    duplicates: int = 0

    def __add__(self, other: Learned) -> Learned:
        return Learned(self.tokens + other.tokens, self.texts + other.texts, self.duplicates + other.duplicates)


class Learning:
    """Adds text to namespaces and removes it. Used by the event loop alone."""

    def __init__(self, max_waiting: int) -> None:
        """`max_waiting`: tokens of a namespace that may wait to become draftable."""
        self._max_waiting = max_waiting

    async def learn(self, namespace: Namespace, message: pb.Texts) -> Learned:
        """Learn finished texts once there is room.

        Raises WireError, with no effect, for an invalid message, and ClosedError.
        """
        texts = read_texts(message, namespace.model.vocabulary_size)
        tokens = learned = 0
        for index, name in enumerate(texts.request_ids):
            if index % TEXTS_PER_TURN == 0:
                await asyncio.sleep(0)
                await self.wait_for_room(namespace)
            text = texts.text(index)
            if namespace.learn(text, name):
                tokens, learned = tokens + len(text), learned + 1
        return Learned(tokens, learned, len(texts) - learned)

    async def forget(self, namespace: Namespace, request_id: str) -> None:
        """Forget what was learned under a name; returns once no draft can contain it."""
        namespace.forget(request_id)
        await self._refresh(namespace)

    async def forget_before(self, namespace: Namespace, moment: float) -> None:
        """Forget what was learned before a time, in seconds since 1970; returns once no draft can contain it."""
        namespace.forget_before(moment)
        await self._refresh(namespace)

    async def wait_for_room(self, namespace: Namespace) -> None:
        """Return once fewer tokens than the limit wait. Raises ClosedError."""
        while not namespace.is_closed:
            if namespace.corpus.waiting <= self._max_waiting:
                return
            await asyncio.sleep(POLL_S)
        raise ClosedError(f"namespace {namespace.name!r} was dropped")

    async def _refresh(self, namespace: Namespace) -> None:
        await asyncio.to_thread(namespace.corpus.refresh)
        if namespace.passages is not None:
            namespace.passages.purge(namespace.corpus)
