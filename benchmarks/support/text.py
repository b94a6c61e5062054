"""Reproducible text of any size for measuring an index, with matches of all lengths.

A request is a sequence of phrases of 3 to 24 tokens whose frequencies follow Zipf's law; one token in twelve is
replaced, so that repeats are frequent and short, as in real traffic.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

VOCABULARY = 50_000
PHRASES, LONGEST_PHRASE, SHORTEST_PHRASE = 100_000, 24, 3
CHANGED = 1 / 12
REQUEST_TOKENS = 250
AT_ONCE = 2_000


class Writer:
    """Generates requests from a seed."""

    def __init__(self, seed: int) -> None:
        world = np.random.default_rng(0)
        # The frequencies of tokens follow Zipf's law too.
        self._words = np.minimum(world.zipf(1.3, PHRASES * LONGEST_PHRASE), VOCABULARY).astype(np.uint32) - 1
        self._words = world.permutation(VOCABULARY).astype(np.uint32)[self._words].reshape(PHRASES, LONGEST_PHRASE)
        self._lengths = world.integers(SHORTEST_PHRASE, LONGEST_PHRASE + 1, PHRASES)
        self._rng = np.random.default_rng(seed)

    def requests(self) -> Iterator[np.ndarray]:
        """Generate requests of REQUEST_TOKENS tokens, uint32."""
        while True:
            text = self._text(AT_ONCE * REQUEST_TOKENS)
            yield from text[: len(text) // REQUEST_TOKENS * REQUEST_TOKENS].reshape(-1, REQUEST_TOKENS)

    def take(self, tokens: int) -> list[np.ndarray]:
        """Return requests of about `tokens` tokens in all."""
        requests = self.requests()
        return [next(requests) for _ in range(max(1, tokens // (REQUEST_TOKENS + 1)))]

    def _text(self, tokens: int) -> np.ndarray:
        picked = np.minimum(self._rng.zipf(1.1, 2 * tokens // (SHORTEST_PHRASE + LONGEST_PHRASE)), PHRASES) - 1
        used = np.arange(LONGEST_PHRASE) < self._lengths[picked][:, None]
        text = self._words[picked][used]
        changed = self._rng.random(len(text)) < CHANGED
        text[changed] = self._rng.integers(0, VOCABULARY, int(changed.sum()), np.uint32)
        return text
