"""Origin of accepted draft tokens: the age of the remembered text, and the request that produced it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from ssd.corpus.corpus import Corpus
from ssd.corpus.search import longest_match
from ssd.replay import Recording, Step
from ssd.types import Source

EVERY = 8
"""Accepted drafts per one that is traced."""
CONTEXT = 32
"""Tokens up to the last accepted one that are searched for."""


@dataclass
class Origins:
    """Origins of traced drafts, as parallel lists. Drafts from requests that were still running are left out."""

    accepted: list[int] = field(default_factory=list)
    """Number of accepted tokens."""
    ages: list[int] = field(default_factory=list)
    """Tokens that were remembered after the newest occurrence that was found; -1 if the text is not from the corpus."""
    requests: list[int] = field(default_factory=list)
    """The request that was drafted for."""
    sources: list[int] = field(default_factory=list)
    """The request whose text it was; -1 if the text is not from the corpus."""


class Tracer:
    """Traces accepted drafts to the requests in the corpus that contain them."""

    def __init__(self, recording: Recording, corpus: Corpus) -> None:
        self.origins = Origins()
        self._recording = recording
        self._corpus = corpus
        self._ends: list[int] = []
        """Number of tokens in the corpus after each remembered request."""
        self._finished: list[int] = []
        self._count = 0

    def remember(self, tokens: np.ndarray, request_id: str | None, tag: int) -> None:
        """Append a request to the corpus; for the argument `remember` of its drafter."""
        self._corpus.append(tokens, request_id, tag=tag)
        separator = 1
        self._ends.append((self._ends[-1] if self._ends else 0) + len(tokens) + separator)

    def observe(self, step: Step) -> None:
        """Record the accepted drafts of a step of the replay, and which requests end with it."""
        rows = np.flatnonzero(step.accepted)
        accepted = step.accepted[rows]
        ends = step.ends[rows] - step.committed[rows] + accepted
        is_shared = step.drafts.source[step.drafts.offsets[rows] + step.last_accepted[rows]] != Source.LOCAL
        columns = (step.requests[rows], ends, accepted, is_shared)
        for each in zip(*(column.tolist() for column in columns), strict=True):
            self._count += 1
            if self._count % EVERY == 0:
                self._trace(*each)
        self._finished += step.requests[step.ended].tolist()

    def _trace(self, request: int, end: int, accepted: int, is_shared: bool) -> None:
        """Record the origin of an accepted draft.

        end: index in `Recording.tokens` after its last accepted token. is_shared: whether that token came from another
        request's text.
        """
        age = source = -1
        if is_shared:
            start = max(int(self._recording.starts[request]), end - max(CONTEXT, accepted + 1))
            text = np.asarray(self._recording.tokens[start:end])
            match = longest_match(self._corpus.view, text, self._corpus.depth)
            age = match.age if match.length > min(accepted, self._corpus.depth - 1) else -1
            source = self._request_at(self._corpus.indexed - age) if age >= 0 else -1
            if source < 0:  # Its user is unknown, but it is not the request's own text either.
                return
        origins = self.origins
        for column, value in (
            (origins.accepted, accepted),
            (origins.ages, age),
            (origins.requests, request),
            (origins.sources, source),
        ):
            column.append(value)

    def _request_at(self, position: int) -> int:
        place = bisect_right(self._ends, position)
        return self._finished[place] if place < len(self._ends) else -1
