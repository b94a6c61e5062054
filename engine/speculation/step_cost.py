"""Duration of a step by its number of tokens: measured when the engine starts, corrected while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np

REPEATS = 3
"""Measurements of each size; the fastest one is used, because other load can only make a step slower."""
MEASURING_S = 3.0
"""Time after which no larger size is measured; the last slope is extrapolated."""
LEARNING_RATE = 0.05
"""Weight of a step in the correction of its size."""
SHARED = 0.8
"""Share of a correction that applies to all sizes: other load during the measurement slowed all of them."""
PROBE_RATE = 0.5
"""Weight of a probe, a step that runs only to measure its size; it corrects that size alone."""
MAX_DEVIATION = 4.0
"""Largest factor between measured and expected time; larger ones are clipped, because the step was disturbed."""
MANY_SEQUENCES = 16
"""Number of sequences in the step that measures the time per sequence."""
MIN_COST = 1e-4


class Cost(Protocol):
    """Cost of steps in seconds."""

    def seconds(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """See `StepCost.seconds`."""
        ...

    def record(self, tokens: int, sequences: int, seconds: float, *, is_probe: bool = False) -> None:
        """See `StepCost.record`."""
        ...

    def of_one_more(self, tokens: int, sequences: int) -> float:
        """See `StepCost.of_one_more`."""
        ...


class StepCost:
    """Seconds per step as a function of its tokens and sequences, linear between the measured sizes."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float], per_sequence: float = 0.0) -> None:
        """sizes: ascending numbers of tokens. seconds: time of a step of that size with one sequence. per_sequence:
        time that each further sequence adds, apart from its tokens.
        """
        self._sizes = np.array(sizes, np.float64)
        # More tokens never take less time; measurements that say otherwise were disturbed.
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))
        self._per_sequence = max(0.0, per_sequence)

    @classmethod
    def measured(cls, run: Callable[[int, int], object], sizes: Sequence[int], sequences: int = 1) -> StepCost:
        """Time `run(tokens, sequences)`, a step of `tokens` tokens of each sequence, at ascending sizes.

        The time per sequence is measured with one token of each of up to `sequences` sequences.
        """
        run(sizes[0], 1)  # The first call allocates and compiles.
        measured: list[int] = []
        seconds: list[float] = []
        began = perf_counter()
        while len(measured) < len(sizes) and (len(measured) < 2 or perf_counter() - began < MEASURING_S):
            measured.append(sizes[len(measured)])
            seconds.append(fastest(run, measured[-1], 1))
        many = min(sequences, MANY_SEQUENCES)
        of_one = float(cls(measured, seconds).seconds(many, 1))
        per_sequence = (fastest(run, 1, many) - of_one) / (many - 1) if many > 1 else 0.0
        return cls(measured, seconds, per_sequence)

    def seconds(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """Return the time of steps with these numbers of tokens, float64 of the shape of `tokens`."""
        slope = 0.0
        if len(self._sizes) > 1:
            slope = (self._seconds[-1] - self._seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
        beyond = np.maximum(0, np.asarray(tokens, np.float64) - self._sizes[-1]) * slope
        return np.interp(tokens, self._sizes, self._seconds) + beyond + self._per_sequence * (sequences - 1)

    def record(self, tokens: int, sequences: int, seconds: float, *, is_probe: bool = False) -> None:
        """Correct the estimate with a step that took `seconds`. `is_probe`: it ran to measure a rare size."""
        expected = float(self.seconds(tokens, sequences))
        factor = min(max(seconds / expected, 1 / MAX_DEVIATION), MAX_DEVIATION)
        nearness = np.exp(-np.abs(np.log(self._sizes / max(1, tokens))))
        weights = PROBE_RATE * nearness if is_probe else LEARNING_RATE * (SHARED + (1 - SHARED) * nearness)
        self._seconds = np.maximum.accumulate(self._seconds * factor**weights)

    def of_one_more(self, tokens: int, sequences: int) -> float:
        """Return the time of one more token in a step of `tokens`, as a fraction of the step's time per sequence, 0 to
        1.

        A step produces one token per sequence, so this compares a draft token with a token decoded without drafts.
        """
        now, more = self.seconds(np.array([tokens, tokens + sequences]), sequences)
        return float(min(1.0, max(MIN_COST, (more - now) / now)))


class PaddedCost:
    """Cost of steps that are padded to a few shapes: draft tokens that replace padding are free."""

    def __init__(self, cost: StepCost, pad: Callable[[np.ndarray | int, int], np.ndarray]) -> None:
        """cost: by number of rows, padding included. pad: rows of the shape that runs `tokens` of `sequences`."""
        self._cost = cost
        self._pad = pad

    def seconds(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """See `StepCost.seconds`."""
        return self._cost.seconds(self._pad(tokens, sequences), sequences)

    def record(self, tokens: int, sequences: int, seconds: float, *, is_probe: bool = False) -> None:
        """See `StepCost.record`."""
        self._cost.record(int(self._pad(tokens, sequences)), sequences, seconds, is_probe=is_probe)

    def of_one_more(self, tokens: int, sequences: int) -> float:
        """See `StepCost.of_one_more`; without padding, since the next shape begins at an arbitrary distance."""
        return self._cost.of_one_more(tokens, sequences)


def fastest(run: Callable[..., object], *arguments: object) -> float:
    """Return the duration of the fastest of a few calls of `run`, in seconds."""
    found = float("inf")
    for _ in range(REPEATS):
        began = perf_counter()
        run(*arguments)
        found = min(found, perf_counter() - began)
    return found
