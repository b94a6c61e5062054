"""Prompt lookup: draft the continuation of an earlier occurrence of the last few tokens in the same request.

Saxena, "Prompt Lookup Decoding" (2023); vLLM offers it as `ngram`. Nothing is remembered beyond a request.
"""

from __future__ import annotations

import numpy as np

from ssd.types import NO_PATH, DraftBatch, Drafter, Path, Progress, Source

LONGEST = 4
SHORTEST = 2
"""Longest and shortest match in tokens; a common setting of vLLM."""


class NgramDrafter(Drafter):
    """Matches the last 4 tokens, then 3, then 2, and drafts from the most recent occurrence."""

    def __init__(self) -> None:
        self._texts: dict[int, np.ndarray] = {}

    def start(self, sequence_id: int, prompt: np.ndarray, *, hints: np.ndarray | None = None) -> None:
        """Begin a sequence; hints: uint32 [H], text that is searched like the prompt.

        Raises ValueError if its id is in use.
        """
        if sequence_id in self._texts:
            raise ValueError(f"sequence {sequence_id} is already running")
        self._texts[sequence_id] = np.concatenate((prompt[:0] if hints is None else hints, prompt))

    def draft(self, progress: Progress) -> DraftBatch:
        """Return drafts from each sequence's own text. Raises ValueError for a sequence that was not started."""
        sequence_ids = progress.sequence_ids.tolist()
        for sequence_id in sequence_ids:
            self._check(sequence_id)
        paths = []
        for index, (sequence_id, limit) in enumerate(zip(sequence_ids, progress.max_draft.tolist(), strict=True)):
            committed = progress.tokens[progress.offsets[index] : progress.offsets[index + 1]]
            self._texts[sequence_id] = np.concatenate((self._texts[sequence_id], committed))
            paths.append(look_up(self._texts[sequence_id], limit))
        return DraftBatch.from_paths(paths)

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = True) -> None:
        """End a sequence. Raises ValueError if it was not started."""
        self._check(sequence_id)
        del self._texts[sequence_id]

    def close(self) -> None:
        """Remove all sequences."""
        self._texts.clear()

    def _check(self, sequence_id: int) -> None:
        if sequence_id not in self._texts:
            raise ValueError(f"sequence {sequence_id} was not started")


def look_up(text: np.ndarray, limit: int) -> Path:
    """Return the tokens after the most recent occurrence of the longest match, at most `limit`.

    text: uint32 [N]; its last tokens are matched.
    """
    for length in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        matches = np.ones(len(text) - length, bool)
        for offset in range(length):
            matches &= text[offset : offset + len(matches)] == text[len(text) - length + offset]
        starts = np.flatnonzero(matches)
        if len(starts):
            tokens = text[starts[-1] + length :][:limit].copy()
            # Prompt lookup gives no probabilities; the token budget calibrates these from observed acceptance.
            return Path(tokens, np.ones(len(tokens), np.float32), Source.LOCAL)
    return NO_PATH
