"""Outputs of requests as pieces of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.api.messages import OutputEvent, RequestEnded
from engine.models.tokenizer import Detokenizer
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion

NO_TOKENS = np.empty(0, np.uint32)


class Piece(NamedTuple):
    """A part of an output's text."""

    text: str
    is_drafted: bool
    """Whether its tokens were drafted."""


@dataclass(frozen=True, eq=False)
class Delta:
    """The next part of an output, or a complete output."""

    index: int
    """Index of its request."""
    pieces: list[Piece]
    tokens: np.ndarray
    """uint32 [n]."""
    logprobs: Logprobs | None = None
    """Log-probabilities of `tokens`, if requested."""
    completion: Completion | None = None
    """Set in the last delta of an output."""

    @property
    def text(self) -> str:
        """Text of all pieces."""
        return "".join(piece.text for piece in self.pieces)


class OutputText:
    """Text of one output, released in pieces of complete characters that cannot belong to a stop string.

    The engine decides where an output ends; this class only holds text back while it may still be cut.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._held = ""
        """Text that may belong to a stop string."""
        self._released = 0
        """Number of characters released."""

    def feed(self, tokens: np.ndarray, accepted: int) -> list[Piece]:
        """Add tokens and return the pieces that can be released. The first `accepted` tokens were drafted."""
        pieces = []
        for part, is_drafted in ((tokens[:accepted], True), (tokens[accepted:], False)):
            if len(part):
                text = self._split_off_certain("".join(map(self._detokenizer.feed, part.tolist())))
                pieces += self._release(text, is_drafted)
        return pieces

    def finish(self, whole: str | None) -> list[Piece]:
        """Return the remaining pieces. `whole`: the complete text if the engine cut it at a stop string."""
        rest = self._held + self._detokenizer.finish() if whole is None else whole[self._released :]
        return self._release(rest, is_drafted=False)

    def _split_off_certain(self, text: str) -> str:
        # `min_tokens` may let a complete stop string pass without ending the output; it must be released later.
        searched = len(self._held)
        self._held += text
        starts = [self._held.find(stop, max(0, searched - len(stop) + 1)) for stop in self._stops]
        certain = min((start for start in starts if start >= 0), default=len(self._held) - self._stop_prefix_length())
        released, self._held = self._held[:certain], self._held[certain:]
        return released

    def _stop_prefix_length(self) -> int:
        """Return the length of the longest suffix of the held text that is a proper prefix of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(self._held[-size:]) for stop in self._stops)), 0)

    def _release(self, text: str, is_drafted: bool) -> list[Piece]:
        self._released += len(text)
        return [Piece(text, is_drafted)] if text else []


def delta_of(index: int, event: OutputEvent, text: OutputText) -> Delta:
    """Return what an event adds to the output of a request; text: that of its output so far, which grows."""
    if isinstance(event, RequestEnded):
        completion = event.completion
        pieces = text.feed(completion.content, 0) if completion.is_repeat else []
        pieces += text.finish(completion.text)
        return Delta(index, pieces, NO_TOKENS, completion=completion)
    return Delta(index, text.feed(event.tokens[: event.visible], event.accepted), event.tokens, event.logprobs)
