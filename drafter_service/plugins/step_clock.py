"""Durations of steps of hosts that run one sequence, from the end of one request for drafts to the next."""

from __future__ import annotations

from time import perf_counter

from drafter_service.plugins.session import HostSession


class StepClock:
    """Measures the steps of one sequence at a time."""

    def __init__(self, session: HostSession) -> None:
        self._session = session
        self._began_s = 0.0
        self._tokens = 0
        """Number of tokens of the step that runs; 0 if none does."""

    def begin(self, tokens: int) -> None:
        """Begin a step of a number of tokens; one that has not ended is dropped."""
        self._began_s, self._tokens = perf_counter(), tokens

    def end(self) -> None:
        """End the step, if one runs, and record its duration."""
        if self._tokens:
            self._session.record_step(self._tokens, 1, perf_counter() - self._began_s)
            self._tokens = 0
