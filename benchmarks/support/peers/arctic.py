"""The suffix trees of Snowflake's ArcticInference, from its package."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.support.drafters import Draft, Running

ARCTIC_DEPTH = 64
"""Maximum total length of a match and its draft. 64 is the package's default and better at copying; vLLM's is 24."""


class Arctic:
    """The suffix trees of Snowflake's ArcticInference, called as its vLLM integration calls them."""

    def __init__(self, k: int, shape: str, factor: float, least_prob: float) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=ARCTIC_DEPTH, max_cached_requests=-1)
        self._limits = {
            "max_spec_tokens": k,
            "max_spec_factor": factor,
            "min_token_prob": least_prob,
            "use_tree_spec": shape == "tree",
        }
        self._remembered = 0

    def start(self, sequence: Running) -> None:
        """Build a tree of the prompt."""
        self._cache.start_request(sequence.index, sequence.request.prompt.view(np.int32))

    def commit(self, sequence: Running) -> None:
        """Add tokens to the request's tree and to the shared one."""
        self._cache.add_active_response(sequence.index, sequence.last.view(np.int32))
        self._remembered += len(sequence.last)

    def finish(self, sequence: Running) -> None:
        """Drop the request's tree."""
        self.commit(sequence)
        self._cache.stop_request(sequence.index)

    def refresh(self) -> None:
        """Do nothing; added text is indexed at once."""

    def draft(self, running: Sequence[Running]) -> tuple[list[Draft], float]:
        """Draft for each sequence in a separate call; the probabilities are path probabilities."""
        contexts = [
            (sequence.index, sequence.request.tokens[max(0, sequence.length - ARCTIC_DEPTH) : sequence.length])
            for sequence in running
        ]
        began = time.perf_counter()
        answers = [self._cache.speculate(index, context.view(np.int32), **self._limits) for index, context in contexts]
        seconds = time.perf_counter() - began
        return [Draft(answer.token_ids, answer.parents, answer.probs) for answer in answers], seconds

    def bytes_per_token(self) -> float | None:
        """Return the memory of the shared tree per token, by its own internal estimate."""
        return self._cache._global_tree.estimate_memory() / max(1, self._remembered)
