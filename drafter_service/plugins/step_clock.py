"""Durations of steps of hosts that run one batch at a time, from the end of one request for drafts to the next."""

from __future__ import annotations

from time import perf_counter

from drafter_service.plugins.session import HostSession


class StepClock:
    """Measures the steps of one batch, one at a time."""

    def __init__(self, session: HostSession) -> None:
        self.session = session
        self._began_s = 0.0
        self._tokens = 0
        """Number of tokens of the step that runs; 0 if none does."""
        self._sequences = 1

    def begin(self, tokens: int, sequences: int = 1) -> None:
        """Begin a step of numbers of tokens and sequences; one that has not ended is dropped."""
        self._began_s, self._tokens, self._sequences = perf_counter(), tokens, sequences

    def end(self) -> None:
        """End the step, if one runs, and record its duration."""
        if self._tokens:
            self.session.record_step(self._tokens, self._sequences, perf_counter() - self._began_s)
            self._tokens = 0
