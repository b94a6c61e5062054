"""The text of an output as it comes: whole characters, and nothing of what may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Decoding(Protocol):
    """Tokens to text, one at a time."""

    def feed(self, token: int) -> str:
        """The text that is certain now, and was not before."""

    def finish(self) -> str:
        """What was held back, now that nothing follows."""


class Piece(NamedTuple):
    """A part of an output's text."""

    text: str
    is_drafted: bool
    """Whether a drafter proposed its tokens."""


class OutputText:
    """The text of one output, handed out in pieces. What ends an output is decided by the engine, not here."""

    def __init__(self, decoding: Decoding, stops: Sequence[str] = ()) -> None:
        self._decoding = decoding
        self._stops = stops
        self._held = ""
        """Not handed out yet; may belong to a stop string."""
        self._sent = 0
        """Characters handed out."""

    def feed(self, tokens: np.ndarray, accepted: int) -> list[Piece]:
        """More tokens, of which the first `accepted` were drafted; what can be handed out."""
        pieces = []
        for part, is_drafted in ((tokens[:accepted], True), (tokens[accepted:], False)):
            if len(part):
                text = self._release("".join(map(self._decoding.feed, part.tolist())))
                pieces += self._hand_out(text, is_drafted)
        return pieces

    def finish(self, whole: str | None) -> list[Piece]:
        """What is left now that nothing follows. `whole`: all of the text, where the engine has cut it itself."""
        rest = self._held + self._decoding.finish() if whole is None else whole[self._sent :]
        return self._hand_out(rest, is_drafted=False)

    def _release(self, text: str) -> str:
        # A stop string that the output did not end with was none: the engine lets the first `min_tokens` pass.
        passed = len(self._held)
        self._held += text
        starts = [self._held.find(stop, max(0, passed - len(stop) + 1)) for stop in self._stops]
        ready = min((start for start in starts if start >= 0), default=len(self._held) - self._may_be_stop())
        out, self._held = self._held[:ready], self._held[ready:]
        return out

    def _may_be_stop(self) -> int:
        """Characters at the end that are the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(self._held[-size:]) for stop in self._stops)), 0)

    def _hand_out(self, text: str, is_drafted: bool) -> list[Piece]:
        self._sent += len(text)
        return [Piece(text, is_drafted)] if text else []
