"""Prompt lookup as transformers (the package itself) and vLLM (re-implemented) do it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.support.peers.text_drafter import Answer, TextDrafter, path

if TYPE_CHECKING:
    from torch import Tensor

PLD_LONGEST = 2
"""Context tokens that are searched for first; the default of transformers."""
NO_LENGTH_LIMIT = 1 << 62

VLLM_SHORTEST, VLLM_LONGEST = 2, 5
"""Lengths of matches in the example of vLLM's documentation (`prompt_lookup_min`, `prompt_lookup_max`)."""


class PromptLookup(TextDrafter):
    """Prompt lookup as in transformers: drafts after the first occurrence of the last 2 tokens, or else of the last."""

    def __init__(self) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        super().__init__()
        self._generator = PromptLookupCandidateGenerator(
            max_matching_ngram_size=PLD_LONGEST, max_length=NO_LENGTH_LIMIT
        )
        self._contexts: dict[int, Tensor] = {}

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Begin a sequence with its prompt."""
        super().start(sequence_id, prompt)
        self._update(sequence_id)

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Commit tokens."""
        super().commit(sequence_id, tokens)
        self._update(sequence_id)

    def speculate(self, sequence_id: int, limit: int) -> Answer:
        """Return the tokens after the match."""
        self._generator.num_output_tokens = limit
        context = self._contexts[sequence_id]
        return path(self._generator.get_candidates(context)[0][0, context.shape[1] :].tolist())

    def _update(self, sequence_id: int) -> None:
        import torch

        self._contexts[sequence_id] = torch.from_numpy(self.texts[sequence_id].tokens.astype(np.int64))[None]


class VllmNgram(TextDrafter):
    """vLLM's `ngram`: drafts after the first occurrence of the longest match of 5 down to 2 tokens of the context.

    The algorithm of `vllm/v1/spec_decode/ngram_proposer.py`; the original searches all lengths in one pass.
    """

    def speculate(self, sequence_id: int, limit: int) -> Answer:
        """Return the tokens after the match."""
        text = self.texts[sequence_id].tokens
        matches = np.arange(1, len(text))
        # Ends of occurrences of the last tokens, for longer and longer matches; the end of the text itself is left out.
        ends: list[np.ndarray] = []
        for length in range(1, VLLM_LONGEST + 1):
            matches = matches[matches >= length]
            matches = matches[text[matches - length] == text[len(text) - length]]
            if len(matches) == 0:
                break
            ends.append(matches)
        if len(ends) < VLLM_SHORTEST:
            return path([])
        end = int(ends[-1][0])
        return path(text[end : end + limit].tolist())
