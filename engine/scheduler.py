"""Who runs in the next step, and with how many tokens."""

from __future__ import annotations

from collections import deque

from engine.config import EngineConfig
from engine.pages import PagePool
from engine.sequence import Sequence


class Scheduler:
    """First come, first served. A sequence is admitted once pages for its longest possible length are free."""

    def __init__(self, config: EngineConfig, pages: PagePool) -> None:
        self.pages = pages
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._config = config

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to running ones while there is room; returns the new ones."""
        admitted = []
        while (
            self.waiting
            and len(self.running) < self._config.max_sequences
            and self.pages.can_take(self.waiting[0].max_length)
        ):
            sequence = self.waiting.popleft()
            sequence.pages = self.pages.take(sequence.max_length)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def schedule(self) -> list[Sequence]:
        """The sequences of the next step, each with its `scheduled` tokens set.

        Every running sequence but those in the middle of their prompt needs one token and its draft; what is left of
        the step's tokens goes to prompts, in the order of arrival.
        """
        decoding = [sequence for sequence in self.running if sequence.computed == len(sequence) - 1]
        budget = self._config.max_step_tokens - len(decoding) * (1 + self._config.max_draft)
        step = []
        for sequence in self.running:
            pending = len(sequence) - sequence.computed
            if pending > 1:
                # The end of a prompt can carry a draft as well.
                pending = min(pending, budget - self._config.max_draft)
                if pending <= 0:
                    continue
                budget -= pending + self._config.max_draft
            sequence.scheduled = pending
            step.append(sequence)
        return step

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or not, and its pages back."""
        self.running.remove(sequence)
        self.pages.give_back(sequence.pages)
        sequence.pages = []

    def check_integrity(self) -> None:
        """Raises AssertionError if pages and sequences do not add up."""
        self.pages.check_integrity([sequence.pages for sequence in self.running])
