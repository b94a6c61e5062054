"""The default policy: the longest match, in the corpus or in the running request itself, ranked by frequency."""

from __future__ import annotations

import numpy as np

from ssd.config import DrafterConfig
from ssd.corpus import View
from ssd.draft import NO_PATH, Path, Source
from ssd.grow import grow_path
from ssd.local import LocalIndex
from ssd.match import Match, find, sample_positions
from ssd.order import full_order


class SuffixPolicy:
    """Drafts what most often followed the longest match of the context."""

    def __init__(self, config: DrafterConfig) -> None:
        self._config = config

    def sort(self, text: np.ndarray) -> np.ndarray:
        """Positions of a corpus text as this policy searches them, uint32."""
        return full_order(text)

    def open(self, prompt: np.ndarray) -> LocalIndex:
        """What is kept for a running request."""
        return LocalIndex(prompt, self._config.match_depth)

    def draft(self, view: View, local: LocalIndex, limit: int) -> Path:
        """A path of at most `limit` tokens from the source that matches longer, of equals from the request itself."""
        remembered = find(view.text, view.order, local.tokens, local.size, self._config.match_depth)
        own = local.match()
        if own.length >= remembered.length:
            return self._grow(local.tokens, local.order, own, limit, Source.LOCAL)
        return self._grow(view.text, view.order, remembered, limit, Source.CORPUS)

    def _grow(self, text: np.ndarray, order: np.ndarray, match: Match, limit: int, source: Source) -> Path:
        if match.length == 0:
            return NO_PATH
        positions = np.empty(self._config.samples, np.uint32)
        tokens, odds = np.empty(limit, np.uint32), np.empty(limit, np.float32)
        count = sample_positions(order, match.left, match.right, len(positions), positions)
        goes_on = source is Source.LOCAL
        size = grow_path(text, positions, count, match.length, limit, self._config.min_path_odds, goes_on, tokens, odds)
        return Path(tokens[:size], odds[:size], source, match.length)
