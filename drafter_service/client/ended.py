"""Sequences that have ended, kept until the service has said that it knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from drafter_service.client.about import About

KEPT_BYTES = 8 << 20
"""Most text that is kept: half a minute of a busy engine's output."""


@dataclass(eq=False)
class Ended:
    """A sequence that has ended."""

    about: About
    committed: np.ndarray
    """uint32 [n]: all that was committed."""
    wire_id: int
    is_known: bool
    """Whether the service has the sequence, running, as far as it was told."""
    told: int
    """How many tokens of `committed` it has."""
    learn: bool
    verified: int
    steps: int

    @property
    def size(self) -> int:
        """Tokens, prompt included."""
        return len(self.about.prompt) + len(self.committed)

    @property
    def nbytes(self) -> int:
        """Of its text."""
        return 4 * self.size

    @property
    def untold_bytes(self) -> int:
        """Of the text that the service is still to be told."""
        return 4 * (len(self.committed) - self.told) if self.is_known else self.nbytes

    def lose(self) -> None:
        """The service does not have it any more."""
        self.is_known = False
        self.told = self.verified = 0


class EndedSequences:
    """Those that the service is still to be told of, and those that it has been told of and has not answered."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.let_go = 0
        """How many that were to be learned were let go because too much waited."""
        self._kept_bytes = kept_bytes
        self._bytes = 0
        self._due: deque[Ended] = deque()
        self._told: dict[int, list[Ended]] = {}
        """By the step of the message."""

    @property
    def are_due(self) -> bool:
        """Whether the service is still to be told of any."""
        return bool(self._due)

    def add(self, ended: Ended) -> None:
        """One more has ended. The oldest are let go for it if there is no room."""
        if not (ended.learn or ended.is_known):
            return
        self._due.append(ended)
        self._bytes += ended.nbytes
        while self._bytes > self._kept_bytes and self._told:
            # Most likely they arrived.
            self._release(self._told.pop(next(iter(self._told))))
        while self._bytes > self._kept_bytes and len(self._due) > 1:
            oldest = self._due.popleft()
            self.let_go += oldest.learn
            self._release([oldest])

    def next_lot(self, most_bytes: int, room: float) -> list[Ended]:
        """Those to tell of next: about so much text, one at least if there is any. `tell` follows.

        room: how many tokens the service can take in, were there none of those that have ended. Sequences that it has
        to be told from their beginning wait until there is enough.
        """
        # Within a message sequences begin before others end.
        room -= sum(ended.size for ended in self._due if ended.is_known)
        lot: list[Ended] = []
        waiting: list[Ended] = []
        size = 0
        while self._due and (not lot or size + self._due[0].untold_bytes <= most_bytes):
            ended = self._due.popleft()
            if not ended.is_known and ended.size > room:
                waiting.append(ended)
                continue
            lot.append(ended)
            size += ended.untold_bytes
            room -= 0 if ended.is_known else ended.size
        self._due.extendleft(reversed(waiting))
        return lot

    def let_go_beyond(self, most_bytes: int, most_tokens: float) -> None:
        """Learn nothing from those that fit into no message, or into no service: they would break every stream."""
        for ended in list(self._due):
            if ended.untold_bytes <= most_bytes and (ended.is_known or ended.size <= most_tokens):
                continue
            self.let_go += ended.learn
            self._bytes -= ended.nbytes
            if ended.is_known:
                # The service has to drop it.
                ended.learn, ended.committed = False, ended.committed[: ended.told].copy()
                self._bytes += ended.nbytes
            else:
                self._due.remove(ended)

    def tell(self, lot: list[Ended], step: int) -> None:
        """The service is told of these in the message with this number."""
        self._told[step] = lot

    def answered(self, step: int, lost: Collection[int]) -> None:
        """A message was answered; sequences in `lost`, wire ids, were not known and are to be told again."""
        for ended in reversed(self._told.pop(step, [])):
            if ended.wire_id in lost and ended.learn:
                ended.lose()
                self._due.appendleft(ended)
            else:
                self._release([ended])

    def resume(self, sizes: Mapping[int, int]) -> None:
        """After a new connection all are to be told of again, but for what the service has: tokens by wire id.

        `sizes` includes prompts.
        """
        again = [ended for lot in self._told.values() for ended in lot]
        self._told.clear()
        self._due.extendleft(reversed(again))
        for ended in list(self._due):
            told = sizes.get(ended.wire_id, 0) - len(ended.about.prompt)
            is_known = ended.is_known and 0 <= told <= len(ended.committed)
            ended.lose()
            if is_known:
                ended.is_known, ended.told = True, told
            elif not ended.learn:
                self._due.remove(ended)
                self._release([ended])

    def known_wire_ids(self) -> set[int]:
        """Of those that the service has as running ones."""
        return {ended.wire_id for ended in self._due if ended.is_known}

    def _release(self, lot: Iterable[Ended]) -> None:
        self._bytes -= sum(ended.nbytes for ended in lot)
