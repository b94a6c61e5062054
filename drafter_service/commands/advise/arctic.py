"""The drafter of Snowflake's Arctic Inference, to compare with where it is installed."""

from __future__ import annotations

from abc import abstractmethod
from importlib.util import find_spec
from typing import Any

import numpy as np

from ssd.types import ROOT, DraftBatch, Drafter, Progress, Source, offsets_of

DEPTH = 64
"""Maximum total length of a match and its draft; the package's default."""
LOW_COST_SETTINGS, HIGH_COST_SETTINGS = (4.0, 0.05), (1.0, 0.1)
"""Draft tokens per matched token, and least path probability: the best of 24 settings on recorded traffic, for costs
of at most `MAX_LOW_COST` and for larger ones."""
MAX_LOW_COST = 0.03


def is_installed() -> bool:
    """Return whether the package `arctic-inference` is installed."""
    return find_spec("arctic_inference") is not None


def settings_for(cost: float) -> tuple[float, float]:
    """Return the settings of `ArcticDrafter` for the cost of verifying one more token, as a fraction of a step."""
    return LOW_COST_SETTINGS if cost <= MAX_LOW_COST else HIGH_COST_SETTINGS


class OneByOne(Drafter):
    """Base of other projects' drafters, which are asked for one sequence at a time."""

    @abstractmethod
    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Commit tokens of a sequence, uint32 [n]."""

    @abstractmethod
    def speculate(self, sequence_id: int, limit: int) -> Any:
        """Return a draft of at most `limit` tokens with the attributes of Arctic's: `token_ids`, `parents`, `probs`."""

    @abstractmethod
    def end(self, sequence_id: int) -> None:
        """End a sequence."""

    def draft(self, progress: Progress) -> DraftBatch:
        """Commit the tokens of all sequences, and draft for each."""
        ids, offsets = progress.sequence_ids.tolist(), progress.offsets.tolist()
        for sequence_id, first, end in zip(ids, offsets[:-1], offsets[1:], strict=True):
            if end > first:
                self.commit(sequence_id, progress.tokens[first:end])
        limits = progress.max_draft.tolist()
        return batch_of([self.speculate(*each) for each in zip(ids, limits, strict=True)])

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = True) -> None:
        """Commit the last tokens and end a sequence."""
        if len(tokens):
            self.commit(sequence_id, tokens)
        self.end(sequence_id)


class ArcticDrafter(OneByOne):
    """Drafts from the suffix trees of the package, called as its vLLM integration calls them."""

    def __init__(self, factor: float, least_prob: float, *, is_tree: bool = True) -> None:
        """Create empty suffix trees; see `LOW_COST_SETTINGS`. is_tree: whether drafts have branches."""
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=DEPTH, max_cached_requests=-1)
        self._settings = {"max_spec_factor": factor, "min_token_prob": least_prob, "use_tree_spec": is_tree}
        self._contexts: dict[int, np.ndarray] = {}

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Begin a sequence, and build a tree of its prompt."""
        self._cache.start_request(sequence_id, prompt.astype(np.int32))
        self._contexts[sequence_id] = prompt[-DEPTH:].astype(np.int32)

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Add tokens, uint32 [n], to the sequence's tree and to the shared one."""
        signed = tokens.astype(np.int32)
        self._cache.add_active_response(sequence_id, signed)
        self._contexts[sequence_id] = np.concatenate((self._contexts[sequence_id], signed))[-DEPTH:]

    def speculate(self, sequence_id: int, limit: int) -> Any:
        """Return the package's draft of at most `limit` tokens for one sequence; commits nothing."""
        return self._cache.speculate(sequence_id, self._contexts[sequence_id], max_spec_tokens=limit, **self._settings)

    def end(self, sequence_id: int) -> None:
        """End a sequence; its text stays in the shared tree."""
        self._cache.stop_request(sequence_id)
        del self._contexts[sequence_id]


def batch_of(answers: list[Any]) -> DraftBatch:
    """Return the drafts of all sequences; the package gives path probabilities."""
    sizes = np.array([len(answer.token_ids) for answer in answers], np.uint32)
    probs = []
    for answer in answers:
        for parent, path_prob in zip(answer.parents, answer.probs, strict=True):
            before = 1.0 if parent == ROOT else answer.probs[parent]
            probs.append(path_prob / before if before else 0.0)
    return DraftBatch(
        tokens=np.array([token for answer in answers for token in answer.token_ids], np.uint32),
        parents=np.array([parent for answer in answers for parent in answer.parents], np.int32),
        accept_prob=np.array(probs, np.float32),
        source=np.full(int(sizes.sum()), Source.CORPUS, np.uint8),
        offsets=offsets_of(sizes),
    )
