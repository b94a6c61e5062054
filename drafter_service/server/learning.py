"""Learning and forgetting at the pace of the index: whoever brings much waits, instead of filling memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from drafter_service.server.namespace import ClosedError, Namespace
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.messages import read_texts

PAUSE_S = 0.005
"""Between two looks at whether the index has caught up."""
AT_ONCE = 256
"""Texts that are taken before others have a turn on the event loop."""


@dataclass(frozen=True)
class Learned:
    """How much was learned."""

    tokens: int = 0
    texts: int = 0
    duplicates: int = 0

    def __add__(self, other: Learned) -> Learned:
        return Learned(self.tokens + other.tokens, self.texts + other.texts, self.duplicates + other.duplicates)


class Learning:
    """Brings text into namespaces, and takes it out. The event loop alone uses it."""

    def __init__(self, most_waiting: int) -> None:
        """`most_waiting`: tokens of a namespace that may wait to become draftable."""
        self._most_waiting = most_waiting

    async def learn(self, namespace: Namespace, message: pb.Texts) -> Learned:
        """Learn finished texts once there is room.

        Raises WireError, with no effect, for a message that cannot be, and ClosedError.
        """
        texts = read_texts(message, namespace.model.vocabulary_size)
        tokens = learned = 0
        for index, name in enumerate(texts.names):
            if index % AT_ONCE == 0:
                await asyncio.sleep(0)
                await self.wait_for_room(namespace)
            text = texts.text(index)
            if namespace.learn(text, name):
                tokens, learned = tokens + len(text), learned + 1
        return Learned(tokens, learned, len(texts) - learned)

    async def forget(self, namespace: Namespace, request: str) -> None:
        """Returns once no draft can hold what was learned under a name."""
        namespace.forget(request)
        await self._take_effect(namespace)

    async def forget_before(self, namespace: Namespace, moment: float) -> None:
        """Returns once no draft can hold what was learned before a time, in seconds since 1970."""
        namespace.forget_before(moment)
        await self._take_effect(namespace)

    async def wait_for_room(self, namespace: Namespace) -> None:
        """Returns once less than the most that may wait does. Raises ClosedError."""
        while not namespace.is_closed:
            if namespace.corpus.waiting <= self._most_waiting:
                return
            await asyncio.sleep(PAUSE_S)
        raise ClosedError(f"namespace {namespace.name!r} was dropped")

    async def _take_effect(self, namespace: Namespace) -> None:
        await asyncio.to_thread(namespace.corpus.refresh)
        if namespace.passages is not None:
            namespace.passages.purge(namespace.corpus)
