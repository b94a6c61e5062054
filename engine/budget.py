"""What a step costs by the tokens in it, and how many draft tokens pay.

A step of N tokens takes t(N) seconds: measured at some sizes when the engine starts, corrected while it runs. Draft
tokens are worth what they are likely to save: B sequences get B tokens a step, and one more for each draft token that
is accepted. So of all tokens that were drafted for a batch the likeliest m are verified, where
(B + their odds) / t(N + m) is largest. With m = 0 among the choices drafts cost nothing where they do not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Tokens in a step; between them t is a straight line."""
REPEATS = 3
"""Of each size; the least counts, since only other work makes a step slower."""
LEARNING_RATE = 0.05
"""Weight of a new step in the correction of its size."""
MOST_DEVIATION = 4.0
"""A step that takes so many times what was expected was disturbed, and corrects no more than this."""


class StepCost:
    """Seconds that a step takes, by its tokens."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """sizes: rising numbers of tokens. seconds: what a step of each took."""
        self._sizes = np.array(sizes, np.float64)
        # More tokens never take less: what seems to was disturbed.
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))

    @classmethod
    def measured(cls, run: Callable[[int], object], most: int) -> StepCost:
        """Time `run`, which makes a step of so many tokens, for sizes up to `most`."""
        sizes = [size for size in SIZES if size < most] + [most]
        run(sizes[-1])  # The first call allocates and compiles.
        return cls(sizes, [min(_seconds_of(run, size) for _ in range(REPEATS)) for size in sizes])

    def seconds(self, tokens: np.ndarray | int) -> np.ndarray:
        """Of steps of so many tokens, float64 like `tokens`."""
        last = (self._seconds[-1] - self._seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
        beyond = np.maximum(0, np.asarray(tokens, np.float64) - self._sizes[-1]) * last
        return np.interp(tokens, self._sizes, self._seconds) + beyond

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        expected = float(self.seconds(tokens))
        factor = min(max(seconds / expected, 1 / MOST_DEVIATION), MOST_DEVIATION)
        distance = np.abs(np.log(self._sizes / max(1, tokens)))
        nearness = np.exp(-distance)
        self._seconds = np.maximum.accumulate(self._seconds * factor ** (LEARNING_RATE * nearness))

    def of_one_more(self, tokens: int, sequences: int) -> float:
        """What one more token costs beside `tokens`, as a part of a step of one of `sequences`, above 0 to 1.

        In the time of a step all sequences together get a token each, so a token has to earn so many times its time.
        """
        ahead = max(1, sequences)
        rise = float(self.seconds(tokens + ahead) - self.seconds(tokens)) / ahead
        return min(1.0, max(LEAST_COST, rise * sequences / float(self.seconds(tokens))))


LEAST_COST = 1e-4


def worth_verifying(odds: np.ndarray, offsets: np.ndarray, tokens: int, sequences: int, cost: StepCost) -> np.ndarray:
    """How many tokens of each sequence's path to verify, int64 [B].

    odds: float [T], of each drafted token to be accepted together with all before it, falling within each path.
    offsets: int [B + 1], into `odds`. tokens: of the step without drafts. sequences: that get a token in it.
    """
    lengths = np.diff(offsets).astype(np.int64)
    if len(odds) == 0:
        return lengths
    order = np.argsort(-odds, kind="stable")
    gained = sequences + np.concatenate(([0.0], np.cumsum(odds[order], dtype=np.float64)))
    rate = gained / cost.seconds(tokens + np.arange(len(odds) + 1))
    chosen = np.zeros(len(odds), np.bool_)
    chosen[order[: int(rate.argmax())]] = True
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner, weights=chosen, minlength=len(lengths)).astype(np.int64)


def path_odds(odds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Odds of whole paths, float64 [T], from those of single tokens given the one before, float [T]."""
    logs = np.log(np.maximum(np.asarray(odds, np.float64), 1e-30))
    sums = np.cumsum(logs)
    before = np.concatenate(([0.0], sums))[np.asarray(offsets[:-1], np.int64)]
    return np.exp(sums - np.repeat(before, np.diff(offsets).astype(np.int64)))


def _seconds_of(run: Callable[[int], object], size: int) -> float:
    began = perf_counter()
    run(size)
    return perf_counter() - began
