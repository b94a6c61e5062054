"""Origin of accepted draft tokens: the age of the remembered text, and the request that produced it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from drafter_service.commands.advise.traffic import Traffic
from ssd.corpus.corpus import Corpus
from ssd.corpus.search import longest_match

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

    def __init__(self, traffic: Traffic, corpus: Corpus) -> None:
        self.origins = Origins()
        self._traffic = traffic
        self._corpus = corpus
        self._ends: list[int] = []
        """Number of tokens in the corpus after each remembered request."""
        self._finished: list[int] = []
        self._count = 0

    def finish(self, request: int) -> None:
        """Record that a request has ended and that its output was indexed."""
        self._ends.append(self._corpus.indexed)
        self._finished.append(request)

    def accept(self, request: int, end: int, accepted: int, is_shared: bool) -> None:
        """Record an accepted draft.

        end: index in `Traffic.tokens` after its last accepted token. is_shared: whether that token came from another
        request's text.
        """
        self._count += 1
        if self._count % EVERY:
            return
        age = source = -1
        if is_shared:
            start = max(int(self._traffic.starts[request]), end - max(CONTEXT, accepted + 1))
            text = np.asarray(self._traffic.tokens[start:end])
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
        return self._finished[place] if place < len(self._finished) else -1
