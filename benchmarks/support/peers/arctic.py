"""The suffix trees of Snowflake's ArcticInference, from its package, called as its vLLM integration calls them."""

from __future__ import annotations

from typing import Any

import numpy as np

DEPTH = 64
"""Maximum total length of a match and its draft; the package's default."""
LOW_COST_SETTINGS, HIGH_COST_SETTINGS = (4.0, 0.05), (1.0, 0.1)
"""Draft tokens per matched token, and least path probability: the best of 24 settings on recorded traffic, for costs
of at most 0.03 and for larger ones."""


class Arctic:
    """The drafter, and the memory that it takes."""

    def __init__(self, factor: float, least_prob: float, *, is_tree: bool = True) -> None:
        """Create empty suffix trees; see `LOW_COST_SETTINGS`. is_tree: whether drafts have branches."""
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=DEPTH, max_cached_requests=-1)
        self._settings = {"max_spec_factor": factor, "min_token_prob": least_prob, "use_tree_spec": is_tree}
        self._contexts: dict[int, np.ndarray] = {}
        self._remembered = 0

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Begin a sequence, and build a tree of its prompt, uint32 [P]."""
        self._cache.start_request(sequence_id, prompt.astype(np.int32))
        self._contexts[sequence_id] = prompt[-DEPTH:].astype(np.int32)

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Add tokens, uint32 [n], to the sequence's tree and to the shared one."""
        if len(tokens):
            signed = tokens.astype(np.int32)
            self._cache.add_active_response(sequence_id, signed)
            self._contexts[sequence_id] = np.concatenate((self._contexts[sequence_id], signed))[-DEPTH:]
        self._remembered += len(tokens)

    def speculate(self, sequence_id: int, limit: int) -> Any:
        """Return the package's draft of at most `limit` tokens for one sequence; commits nothing."""
        return self._cache.speculate(sequence_id, self._contexts[sequence_id], max_spec_tokens=limit, **self._settings)

    def finish(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Commit the last tokens and end a sequence."""
        self.commit(sequence_id, tokens)
        self._cache.stop_request(sequence_id)
        del self._contexts[sequence_id]

    def forget(self, sequence_id: int) -> None:
        """Remove a sequence's text from the shared tree."""
        self._cache.evict_cached_response(sequence_id)

    def bytes_per_token(self) -> float:
        """Return the memory of the shared tree per token, by its own internal estimate."""
        return self._cache._global_tree.estimate_memory() / max(1, self._remembered)
