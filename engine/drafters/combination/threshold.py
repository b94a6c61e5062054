"""Baseline of combination: the corpus' draft replaces the network's where its match is long enough.

The rule of TensorRT-LLM (`SAEnhancerConfig(threshold=4)`) and Arctic Inference, for comparison with
`engine.drafters.combination.combined`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from engine.drafters.base import Drafts
from engine.drafters.combination.combined import ROOM, CombinedDrafter, Merged, Part, add_drafts, joint_drafts
from engine.drafters.tokens import TokenDrafter
from engine.scheduling.plan import StepPlan
from ssd.corpus.search import longest_match
from ssd.drafter import SuffixDrafter

MATCH_DEPTH = 32
"""Number of context tokens that are searched for."""


class ThresholdDrafter(CombinedDrafter):
    """Drafts from the corpus after a match of at least `threshold` tokens, otherwise with the network."""

    def __init__(self, parts: SequenceOf[Part], *, has_trees: bool, threshold: int) -> None:
        """Raises ValueError unless the parts are `ssd` and one drafter that runs a network."""
        super().__init__(parts, has_trees=has_trees)
        first, *models = self.parts
        is_corpus = isinstance(first.drafter, TokenDrafter) and isinstance(first.drafter.inner, SuffixDrafter)
        if not is_corpus or [part.runs_model for part in models] != [True]:
            raise ValueError("a threshold needs ssd and one drafter that runs a network")
        self._threshold = threshold

    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`."""
        merged = [Merged.empty(ROOM, len(self.parts)) for _ in plan.producing]
        proposals = [self._ask(part, plan) for part in self.parts]
        has_match = [self._match_length(entry.sequence.tokens) >= self._threshold for entry in plan.producing]
        for number, drafts in enumerate(proposals):
            chosen = [one if has_match[index] == (number == 0) else None for index, one in enumerate(merged)]
            add_drafts(drafts.batch, number, chosen)
        self._expected(plan.producing, merged)
        for entry, one in zip(plan.producing, merged, strict=True):
            self._merged[entry.sequence.sequence_id] = one
        return Drafts(joint_drafts(merged))

    def _match_length(self, tokens: np.ndarray) -> int:
        """Return the length of the longest match of the last tokens, in the corpus or earlier in the same text."""
        corpus = self.parts[0].drafter.inner.corpus  # type: ignore[attr-defined]
        context = tokens[-MATCH_DEPTH:]
        return max(longest_match(corpus.view, context, MATCH_DEPTH).length, own_match_length(tokens, self._threshold))


def own_match_length(tokens: np.ndarray, longest: int) -> int:
    """Return how many of the last tokens, at most `longest`, occur earlier in the text; tokens: uint32 [N]."""
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
        if (windows == tokens[-length:]).all(axis=1).any():
            return length
    return 0
