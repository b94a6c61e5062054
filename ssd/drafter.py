"""The face of the package: a drafter that remembers, embedded in the calling process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from ssd.article import ArticlePolicy
from ssd.config import DrafterConfig
from ssd.corpus import Corpus, View
from ssd.draft import NO_PATH, DraftBatch, Path, Progress, check_outcome
from ssd.local import GrowingText
from ssd.ring import check_tokens
from ssd.stats import Stats
from ssd.suffix import SuffixPolicy


class Policy(Protocol):
    """How a corpus is sorted and drafts are found in it."""

    def sort(self, text: np.ndarray) -> np.ndarray:
        """Positions of a corpus text, uint32 [N], as this policy searches them, uint32 [M]."""
        ...

    def open(self, prompt: np.ndarray) -> Any:
        """What is kept for a running request with this prompt: a `GrowingText` or more."""
        ...

    def draft(self, view: View, local: Any, limit: int) -> Path:
        """A path of at most `limit` tokens for what `open` gave."""
        ...


POLICIES: dict[str, Callable[[DrafterConfig], Policy]] = {"suffix": SuffixPolicy, "article": ArticlePolicy}


def new_corpus(config: DrafterConfig) -> Corpus:
    """An empty corpus for drafters of this configuration. Raises ValueError for an impossible capacity."""
    return Corpus(config.capacity, POLICIES[config.policy](config).sort)


@dataclass
class Running:
    """One started sequence."""

    local: GrowingText
    last: Path = NO_PATH
    """The draft it was last offered."""


class SuffixDrafter:
    """Drafts from everything that was finished, and from each running request itself.

    One thread at a time may use it. Several drafters can share a corpus, each with its own running sequences.
    """

    def __init__(
        self, config: DrafterConfig | None = None, *, corpus: Corpus | None = None, stats: Stats | None = None
    ) -> None:
        """Without `corpus` the drafter has one of its own, refreshed in the background until `close`."""
        self.config = config or DrafterConfig()
        self.stats = stats or Stats()
        self._policy = POLICIES[self.config.policy](self.config)
        self._owns_corpus = corpus is None
        self.corpus = corpus or new_corpus(self.config)
        if self._owns_corpus:
            self.corpus.maintain(self.config.refresh_interval_s)
        self._running: dict[int, Running] = {}

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Begin a sequence with its prompt, uint32 [P]. Raises ValueError for an id in use or a token out of range."""
        if sequence_id in self._running:
            raise ValueError(f"sequence {sequence_id} was started before and not finished")
        check_tokens(prompt)
        self._running[sequence_id] = Running(self._policy.open(prompt))

    def draft(self, progress: Progress) -> DraftBatch:
        """Take note of what was committed and draft what may follow. Raises ValueError as `Progress.check` does."""
        progress.check(self.offered())
        sequences = [self._running[sequence_id] for sequence_id in progress.sequence_ids.tolist()]
        view = self.corpus.view
        offsets = progress.offsets.tolist()
        verified, accepted = progress.verified.tolist(), progress.accepted.tolist()
        paths = []
        for index, (sequence, limit) in enumerate(zip(sequences, progress.max_draft.tolist(), strict=True)):
            committed = progress.tokens[offsets[index] : offsets[index + 1]]
            self._commit(sequence, committed, verified[index], accepted[index])
            sequence.last = self._draft_one(view, sequence, min(limit, self.config.max_draft))
            paths.append(sequence.last)
        return DraftBatch.of_paths(paths)

    def finish(
        self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, accepted: int = 0, learn: bool = True
    ) -> None:
        """End a sequence; `tokens`, uint32 [n], were committed since its last draft. Raises ValueError as `draft`."""
        check_tokens(tokens)
        check_outcome(sequence_id, verified, accepted, self.offered())
        sequence = self._running.pop(sequence_id)
        self._commit(sequence, tokens, verified, accepted)
        if learn:
            local = sequence.local
            self.corpus.append(local.tokens[max(0, local.prompt_length - self.config.learned_prompt_tokens) :])

    def offered(self) -> dict[int, int]:
        """The running sequences, each with the tokens of its last draft."""
        return {sequence_id: len(sequence.last.tokens) for sequence_id, sequence in self._running.items()}

    def close(self) -> None:
        """Forget the running sequences and stop the background refresh of a corpus of its own."""
        self._running.clear()
        if self._owns_corpus:
            self.corpus.close()

    def __enter__(self) -> SuffixDrafter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _commit(self, sequence: Running, tokens: np.ndarray, verified: int, accepted: int) -> None:
        if len(tokens):
            self.stats.record(sequence.last, len(tokens), verified, accepted)
        sequence.local.extend(tokens)

    def _draft_one(self, view: View, sequence: Running, limit: int) -> Path:
        if limit <= 0 or sequence.local.size == 0:
            return NO_PATH
        return self._policy.draft(view, sequence.local, limit)
