"""How the counters of a namespace grew: samples that lie ever farther apart the older they are."""

from __future__ import annotations

from typing import NamedTuple

MOST_SAMPLES = 512


class Sample(NamedTuple):
    """Totals at one time."""

    time: float
    """Seconds since 1970."""
    steps: int
    committed: int
    hits: int
    drafted: int
    accepted: int
    corpus_tokens: int
    appended_tokens: int
    memory_bytes: int
    timeouts: int


class History:
    """Samples of totals, oldest first, in bounded memory."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def note(self, sample: Sample) -> None:
        """Add a sample; once there are too many, every other one of the older half goes."""
        # When the clock was set back, what lies in the future now was dated wrongly.
        while self.samples and self.samples[-1].time >= sample.time:
            self.samples.pop()
        self.samples.append(sample)
        if len(self.samples) > MOST_SAMPLES:
            half = MOST_SAMPLES // 2
            self.samples[1:half] = self.samples[1:half:2]
