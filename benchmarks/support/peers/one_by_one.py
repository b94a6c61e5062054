"""Base of the re-implemented drafters."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.support.drafters import Draft, Running


class OneByOne:
    """A drafter that is asked for one sequence at a time. A subclass overrides what it needs."""

    def start(self, sequence: Running) -> None:
        """Do nothing."""

    def commit(self, sequence: Running) -> None:
        """Do nothing."""

    def finish(self, sequence: Running) -> None:
        """Do nothing."""

    def refresh(self) -> None:
        """Do nothing; text is indexed at once."""

    def draft(self, running: Sequence[Running]) -> tuple[list[Draft], float]:
        """Return a draft for each sequence, and the seconds that they took."""
        began = time.perf_counter()
        drafts = [self.draft_one(sequence) for sequence in running]
        return drafts, time.perf_counter() - began

    def draft_one(self, sequence: Running) -> Draft:
        """Return the draft of one sequence."""
        raise NotImplementedError

    def bytes_per_token(self) -> float | None:
        """Return None; memory of Python objects says nothing about the original."""
        return None


def path(tokens: list[int]) -> Draft:
    """Return a draft without branches."""
    return Draft(tokens, list(range(-1, len(tokens) - 1)), None)
