"""Whether the pipelined loop begins a step before or after it knows the one before.

Before: the device never waits for the host, but drafts are made for a text that is not known yet, and fewer of them
fit. After: the device waits for what the host does between two steps, and drafts are as good as in the plain loop. So a
step is waited for where the host's part is small beside what better drafts gain: with few sequences, a large model, and
a drafter that is often right.
"""

from __future__ import annotations

LATE_LOSS = 0.3
"""Of accepted tokens, what is lost by drafts that come a step late: 0.24 to 0.37 in replays of four kinds of traffic
with a corpus that knows such traffic, see docs/experiments.md."""
MEMORY = 0.95
"""What is left of a step after the next: about twenty count."""


class Pace:
    """Judges by the steps of late."""

    def __init__(self) -> None:
        self._host_s = self._step_s = 0.0
        self._accepted = self._produced = 0.0

    @property
    def waits(self) -> bool:
        """Whether the next step is to begin when this one is known."""
        return self._host_s * self._produced < LATE_LOSS * self._accepted * self._step_s

    def note(self, host_s: float, step_s: float, accepted: int, produced: int) -> None:
        """In a step that took so long the host was busy for so long, while nothing need have run; of so many tokens
        that came of it so many were drafted.
        """
        self._host_s = MEMORY * self._host_s + host_s
        self._step_s = MEMORY * self._step_s + step_s
        self._accepted = MEMORY * self._accepted + accepted
        self._produced = MEMORY * self._produced + produced
