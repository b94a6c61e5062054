"""Who learns the documents of a load."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from drafter_service.ingest.document import Documents


class Learned(NamedTuple):
    """What became of all documents."""

    documents: int
    tokens: int
    duplicates: int
    """Documents that were left out, because one of their name was learned before."""


class Sink(Protocol):
    """A corpus, near or far."""

    window: int
    """Of the newest documents with so many tokens together, separators included, every one is known by its name."""

    def accept(self, documents: Documents) -> None:
        """Take documents; blocks while the sink is busy."""

    def commit(self) -> None:
        """Returns once all that was accepted is safe: a load that is interrupted goes on behind it."""

    def finish(self) -> Learned:
        """Commit for the last time."""
