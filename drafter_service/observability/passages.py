"""Counts of the pieces of remembered text that were accepted.

They are users' text, so they are counted only if the service is configured to show them.
"""

from __future__ import annotations

import numpy as np

from drafter_service.observability.report.schema import PassageReport
from ssd.corpus.corpus import Corpus
from ssd.corpus.search import longest_match

MIN_LENGTH, MAX_LENGTH = 8, 32
"""Tokens of a piece: shorter ones are not informative, and longer ones are not matched."""
MAX_COUNTED, MAX_SHOWN = 2048, 50


class Passages:
    """Counts of accepted pieces in bounded memory: when there are too many, the least frequent half is dropped."""

    def __init__(self) -> None:
        self._accepted: dict[bytes, int] = {}

    def record(self, accepted: np.ndarray, corpus: Corpus) -> None:
        """Count consecutive accepted draft tokens, uint32 [n], if they occur in finished text."""
        if len(accepted) < MIN_LENGTH or not _is_remembered(accepted[:MAX_LENGTH], corpus):
            return
        piece = accepted[:MAX_LENGTH].tobytes()
        self._accepted[piece] = self._accepted.get(piece, 0) + len(accepted)
        if len(self._accepted) > MAX_COUNTED:
            frequent = sorted(self._accepted.items(), key=lambda item: -item[1])[: MAX_COUNTED // 2]
            self._accepted = dict(frequent)

    def purge(self, corpus: Corpus) -> None:
        """Drop pieces that the corpus no longer contains because they were forgotten or overwritten."""
        self._accepted = {
            piece: count
            for piece, count in self._accepted.items()
            if _is_remembered(np.frombuffer(piece, np.uint32), corpus)
        }

    def most_productive(self, corpus: Corpus) -> list[PassageReport]:
        """Return the pieces that were accepted most, among those that the corpus still contains."""
        self.purge(corpus)
        best = sorted(self._accepted.items(), key=lambda item: -item[1])[:MAX_SHOWN]
        pieces = [(np.frombuffer(piece, np.uint32), count) for piece, count in best]
        return [
            PassageReport(
                accepted=count,
                age_tokens=longest_match(corpus.view, tokens, corpus.depth).age,
                tokens=tokens.tolist(),
            )
            for tokens, count in pieces
        ]


def _is_remembered(tokens: np.ndarray, corpus: Corpus) -> bool:
    match = longest_match(corpus.view, tokens, min(corpus.depth, len(tokens)))
    return match.length == min(corpus.depth, len(tokens)) and match.age >= 0
