"""Duration of a step by its number of tokens: measured when the engine starts, corrected while it runs.

The feed-forward layers of a mixture of experts read the weights of all experts that some token of the step uses, so
their time depends on the number of distinct experts, which `ExpertUse` predicts from the number of tokens.
"""

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
DRAFT_LENGTHS = (0, 1, 2, 4, 8, 16)
"""Lengths of drafts per sequence whose cost is compared; the first one is without drafts."""
EXPERT_RATE = 0.05
"""Weight of a step in the effective number of experts."""


class Cost(Protocol):
    """Cost of steps in seconds."""

    def seconds(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """See `StepCost.seconds`."""
        ...

    def record(
        self, tokens: int, sequences: int, seconds: float, *, is_probe: bool = False, experts: float | None = None
    ) -> None:
        """See `StepCost.record`."""
        ...

    def of_one_more(self, tokens: int, sequences: int) -> float:
        """See `StepCost.of_one_more`."""
        ...


class ExpertUse:
    """Expected number of distinct experts of a layer that a step of N tokens uses.

    Tokens that choose K of E experts independently and uniformly use E * (1 - (1 - K/E)^N) of them on average. Routers
    prefer some experts, and tokens of one text tend to choose the same ones, so E is replaced by an effective number of
    experts, which is learned from the steps that run.
    """

    def __init__(self, per_token: int, count: int) -> None:
        """per_token: number of experts that each token uses. count: number of experts of a layer."""
        self._per_token, self._count = per_token, count
        self._effective = float(count)

    def expected(self, tokens: np.ndarray | int) -> np.ndarray:
        """Return the expected number of distinct experts for numbers of tokens, float64 of the shape of `tokens`."""
        return self._expected(tokens, self._effective)

    def record(self, tokens: int, experts: float) -> None:
        """Learn from a step of `tokens` tokens that used `experts` distinct experts per layer on average."""
        if tokens < 2:
            return  # A single token uses K experts, whatever the effective number.
        low, high = float(self._per_token), float(self._count)
        for _ in range(20):  # The expected number increases with the effective one.
            middle = (low + high) / 2
            if self._expected(tokens, middle) < experts:
                low = middle
            else:
                high = middle
        self._effective += EXPERT_RATE * (high - self._effective)

    def _expected(self, tokens: np.ndarray | int, effective: float) -> np.ndarray:
        return effective * (1.0 - (1.0 - self._per_token / effective) ** np.asarray(tokens, np.float64))


class StepCost:
    """Seconds per step as a function of its tokens and sequences, linear between the measured sizes.

    With experts, the expected number of distinct experts times the seconds per expert is added.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seconds: Sequence[float],
        per_sequence: float = 0.0,
        experts: ExpertUse | None = None,
        per_expert: float = 0.0,
    ) -> None:
        """sizes: ascending numbers of tokens. seconds: time of a step of that size with one sequence, without the time
        of experts. per_sequence: time that each further sequence adds, apart from its tokens. per_expert: time that
        each distinct expert of a layer adds, for all layers.
        """
        self._sizes = np.array(sizes, np.float64)
        # More tokens never take less time; measurements that say otherwise were disturbed.
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))
        self._per_sequence = max(0.0, per_sequence)
        self._experts = experts
        self._per_expert = per_expert

    @classmethod
    def measured(
        cls,
        run: Callable[..., object],
        sizes: Sequence[int],
        sequences: int = 1,
        experts: ExpertUse | None = None,
        used: Callable[[], float] = lambda: 0.0,
    ) -> StepCost:
        """Time `run(tokens, sequences)`, a step of `tokens` tokens of each sequence, at ascending sizes.

        The time per sequence is measured with one token of each of up to `sequences` sequences. With `experts`, each
        size is also timed by `run(tokens, 1, True)`, a step of equal tokens, which all use the same experts. used:
        returns the number of distinct experts per layer in the last run, 0 if they are not counted.
        """
        run(sizes[0], 1)  # The first call allocates and compiles.
        if used() == 0:
            experts = None  # GPUs do not count them; the time of different tokens then includes them.
        rows: list[tuple[float, float, float, float]] = []
        began = perf_counter()
        while len(rows) < len(sizes) and (len(rows) < 2 or perf_counter() - began < MEASURING_S):
            size = sizes[len(rows)]
            equal = (0.0, 0.0) if experts is None else (fastest(run, size, 1, True), used())
            rows.append((fastest(run, size, 1), used(), *equal))
        seconds, counts, equal_seconds, equal_counts = np.array(rows).T
        per_expert = 0.0
        if experts is not None:
            more = counts - equal_counts
            per_expert = max(0.0, float(more @ (seconds - equal_seconds) / max(1.0, more @ more)))
            seconds = np.maximum(equal_seconds - per_expert * equal_counts, 0.0)
        cost = cls(sizes[: len(rows)], seconds, 0.0, experts, per_expert)
        many = min(sequences, MANY_SEQUENCES)
        if many > 1:
            taken = fastest(run, 1, many)
            cost._per_sequence = max(0.0, (taken - float(cost._of_step(many, 1, used()))) / (many - 1))
        return cost

    def seconds(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """Return the time of steps with these numbers of tokens, float64 of the shape of `tokens`."""
        used = 0.0 if self._experts is None else self._experts.expected(tokens)
        return self._of_step(tokens, sequences, used)

    def _of_step(self, tokens: np.ndarray | int, sequences: int, used: np.ndarray | float) -> np.ndarray:
        """Return the time of steps that use `used` distinct experts per layer."""
        slope = 0.0
        if len(self._sizes) > 1:
            slope = (self._seconds[-1] - self._seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
        beyond = np.maximum(0, np.asarray(tokens, np.float64) - self._sizes[-1]) * slope
        apart = np.interp(tokens, self._sizes, self._seconds) + beyond + self._per_sequence * (sequences - 1)
        return apart + self._per_expert * used

    def record(
        self, tokens: int, sequences: int, seconds: float, *, is_probe: bool = False, experts: float | None = None
    ) -> None:
        """Correct the estimate with a step that took `seconds`.

        is_probe: it ran to measure a rare size. experts: number of distinct experts per layer, if counted.
        """
        expected = float(self.seconds(tokens, sequences))
        if self._experts is not None and experts is not None:
            expected = float(self._of_step(tokens, sequences, experts))
            self._experts.record(tokens, experts)
        factor = min(max(seconds / expected, 1 / MAX_DEVIATION), MAX_DEVIATION)
        nearness = np.exp(-np.abs(np.log(self._sizes / max(1, tokens))))
        weights = PROBE_RATE * nearness if is_probe else LEARNING_RATE * (SHARED + (1 - SHARED) * nearness)
        corrected = self._seconds * factor**weights
        # Smaller steps do not take longer. A step that was faster than expected limits them, too.
        self._seconds = np.maximum.accumulate(corrected) if factor > 1 else np.minimum.accumulate(corrected[::-1])[::-1]
        if not is_probe:
            self._per_expert *= factor ** (LEARNING_RATE * SHARED)

    def of_one_more(self, tokens: int, sequences: int) -> float:
        """Return the time of one more token in a step of `tokens`, as a fraction of the step's time per sequence, 0 to
        1.

        A step produces one token per sequence, so this compares a draft token with a token decoded without drafts. The
        result is the lowest mean cost of a token among drafts of several lengths: the first token may be expensive and
        further ones cheap, or the measurement of one size may have been disturbed.
        """
        now, *more = self.seconds(tokens + sequences * np.array(DRAFT_LENGTHS), sequences)
        cost = ((np.array(more) - now) / (now * np.array(DRAFT_LENGTHS[1:]))).min()
        return float(min(1.0, max(MIN_COST, cost)))


class PaddedCost:
    """Cost of steps that are padded to a few shapes: draft tokens that replace padding are free."""

    def __init__(self, cost: StepCost, pad: Callable[[np.ndarray | int, int], np.ndarray]) -> None:
        """cost: by number of rows, padding included. pad: rows of the shape that runs `tokens` of `sequences`."""
        self._cost = cost
        self._pad = pad

    def seconds(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """See `StepCost.seconds`."""
        return self._cost.seconds(self._pad(tokens, sequences), sequences)

    def record(
        self, tokens: int, sequences: int, seconds: float, *, is_probe: bool = False, experts: float | None = None
    ) -> None:
        """See `StepCost.record`."""
        rows = int(self._pad(tokens, sequences))
        self._cost.record(rows, sequences, seconds, is_probe=is_probe, experts=experts)

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
