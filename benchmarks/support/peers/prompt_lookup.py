"""Prompt lookup as transformers (the package itself) and vLLM (re-implemented) do it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.support.drafters import Draft, Running
from benchmarks.support.peers.one_by_one import OneByOne, path

if TYPE_CHECKING:
    from torch import Tensor

PLD_LONGEST = 2
"""Context tokens that are searched for first; the default of transformers."""
NO_LENGTH_LIMIT = 1 << 62

VLLM_SHORTEST, VLLM_LONGEST = 2, 5
"""Lengths of matches in the example of vLLM's documentation (`prompt_lookup_min`, `prompt_lookup_max`)."""


class PromptLookup(OneByOne):
    """Prompt lookup as in transformers: drafts after the first occurrence of the last 2 tokens, or else of the last."""

    def __init__(self, k: int) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=k, max_matching_ngram_size=PLD_LONGEST, max_length=NO_LENGTH_LIMIT
        )
        self._tokens: dict[int, Tensor] = {}

    def start(self, sequence: Running) -> None:
        """Keep prompt and output; drafts use only committed tokens."""
        import torch

        self._tokens[sequence.index] = torch.from_numpy(sequence.request.tokens.astype(np.int64))[None]

    def finish(self, sequence: Running) -> None:
        """Forget the request."""
        del self._tokens[sequence.index]

    def draft(self, running: Sequence[Running]) -> tuple[list[Draft], float]:
        """Draft for each sequence in a separate call."""
        contexts = [self._tokens[sequence.index][:, : sequence.length] for sequence in running]
        began = time.perf_counter()
        answers = [self._generator.get_candidates(context)[0] for context in contexts]
        seconds = time.perf_counter() - began
        drafts = [
            path(answer[0, sequence.length :].tolist()) for sequence, answer in zip(running, answers, strict=True)
        ]
        return drafts, seconds


class VllmNgram(OneByOne):
    """vLLM's `ngram`: drafts after the first occurrence of the longest match of 5 down to 2 tokens of the context.

    The algorithm of `vllm/v1/spec_decode/ngram_proposer.py`; the original searches all lengths in one pass.
    """

    def __init__(self, k: int) -> None:
        self._k = k

    def draft_one(self, sequence: Running) -> Draft:
        """Return the tokens after the match."""
        text = sequence.request.tokens[: sequence.length]
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
        return path(text[end : end + self._k].tolist())
