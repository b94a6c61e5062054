"""The pieces of remembered text that were accepted most.

They are users' text, so nothing is kept unless the service is configured to show them.
"""

from __future__ import annotations

import numpy as np

from drafter_service.observability.facts import Passage
from ssd.corpus.corpus import Corpus
from ssd.corpus.search import longest_match

SHORTEST, LONGEST = 8, 32
"""Tokens of a piece: fewer say nothing, and no more are matched."""
MOST_KEPT, MOST_SHOWN = 2048, 50


class Passages:
    """Counts of accepted pieces. Memory is bounded; what is rare makes room for what is new."""

    def __init__(self) -> None:
        self._accepted: dict[bytes, int] = {}

    def note(self, accepted: np.ndarray, corpus: Corpus) -> None:
        """A run of draft tokens was accepted, uint32 [n]; it counts if finished text has it."""
        if len(accepted) < SHORTEST or not _is_remembered(accepted[:LONGEST], corpus):
            return
        piece = accepted[:LONGEST].tobytes()
        self._accepted[piece] = self._accepted.get(piece, 0) + len(accepted)
        if len(self._accepted) > MOST_KEPT:
            frequent = sorted(self._accepted.items(), key=lambda item: -item[1])[: MOST_KEPT // 2]
            self._accepted = dict(frequent)

    def purge(self, corpus: Corpus) -> None:
        """Drop what the corpus does not hold any more: it was forgotten, or overwritten."""
        self._accepted = {
            piece: count
            for piece, count in self._accepted.items()
            if _is_remembered(np.frombuffer(piece, np.uint32), corpus)
        }

    def most_productive(self, corpus: Corpus) -> tuple[Passage, ...]:
        """The pieces that were accepted most, as far as the corpus still holds them."""
        self.purge(corpus)
        best = sorted(self._accepted.items(), key=lambda item: -item[1])[:MOST_SHOWN]
        pieces = [(np.frombuffer(piece, np.uint32), count) for piece, count in best]
        return tuple(
            Passage(accepted=count, age_tokens=longest_match(corpus.view, tokens, corpus.depth).age, tokens=tokens)
            for tokens, count in pieces
        )


def _is_remembered(tokens: np.ndarray, corpus: Corpus) -> bool:
    match = longest_match(corpus.view, tokens, min(corpus.depth, len(tokens)))
    return match.length == min(corpus.depth, len(tokens)) and match.age >= 0
