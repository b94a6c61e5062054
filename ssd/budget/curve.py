"""The step-time curve of an engine: how long a step takes, by its tokens and sequences.

A curve comes from a profile (measured, or estimated from data sheets), from a measurement at the start, or from a fixed
cost of a draft token. Without any of these, it starts as a guess. Durations of steps that ran correct it
(`ssd.budget.fit`). See docs/budget.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from time import perf_counter

import numpy as np

from ssd.budget.fit import STEPS, Fit, parts_of, record_step, write_seconds
from ssd.budget.padding import NO_PADDING, Padding
from ssd.budget.totals import BudgetTotals, size_of
from ssd.config import check_cost

LARGEST = 8192
"""Largest knot; beyond it the duration continues linearly."""
KNOTS_PER_OCTAVE = 3
DOUBLE_AT = 128
"""In the guess for unknown hardware: number of tokens at which a step takes twice as long as an empty one."""
SEQUENCES_DOUBLE_AT = 128
"""In the guess: number of sequences that add the duration of an empty step, in addition to the time of their tokens."""
GUESSED, MEASURED = 2.0, 0.5
"""Relative standard deviations of the slopes of a guess, and of a curve that was measured or estimated."""
MAX_TOKENS, MAX_SECONDS = 1 << 20, 3600.0
"""Largest number of tokens and longest duration of a step that are possible."""
ALL_STEPS, RECORD_EVERY = 256, 4
"""Number of first steps that are all recorded, and the least interval of later ones of the same kind, to save time: a
record and the prices that follow from it take 0.05 ms."""
MAX_ROWS = 1024
"""Largest number of rows that are kept, one for each number of sequences."""
REPEATS = 3
"""Measurements of each size; the fastest one is used, because other load can only make a step slower."""
MEASURING_S = 3.0
"""Time after which no larger size is measured; the curve continues linearly."""
MANY_SEQUENCES = 16
"""Number of sequences in the step that measures the time per sequence."""

PaddingOf = Padding | Callable[[int], Padding]
"""A padding, or a function that returns that of steps with a number of sequences."""


class StepCurve:
    """Durations of steps. One thread at a time may use it."""

    def __init__(
        self,
        knots: np.ndarray,
        prior: Callable[[int], np.ndarray],
        padding: PaddingOf = NO_PADDING,
        *,
        spread: float | None = MEASURED,
    ) -> None:
        """knots: float64 [K], ascending numbers of tokens. prior: returns the durations at the knots for a number of
        sequences, float64 [K]; they are linear in between. spread: standard deviation of the slopes, relative to those
        of `prior`; None: recorded steps do not change the curve.
        """
        self.knots = knots
        self._padding = padding
        self.revision = 0
        """Number of changes."""
        self.totals = BudgetTotals()
        """Totals of the recorded steps, without drafts; see `TokenBudget.totals`."""
        self._prior = prior
        self._fit = None if spread is None else Fit.of(knots, spread)
        self._steps = 0
        """Number of steps that `record` got."""
        self._recorded = [0, 0]
        """Values of it when a step of each kind was recorded: with one token of each sequence, and with more."""
        self.row = lru_cache(MAX_ROWS)(self._row)
        """Returns the durations at the knots for a number of sequences, float64 [K], without padding and
        `ragged_seconds`."""
        self._parts_of = lru_cache(MAX_ROWS)(self._parts)

    @classmethod
    def unknown(cls, padding: PaddingOf = NO_PADDING) -> StepCurve:
        """Return a guess for unknown hardware, until steps are recorded; its unit is the duration of an empty step."""
        knots = usual_knots()

        def prior(sequences: int) -> np.ndarray:
            guess: np.ndarray = 1 + knots / DOUBLE_AT + sequences / SEQUENCES_DOUBLE_AT
            return guess

        return cls(knots, prior, padding, spread=GUESSED)

    @classmethod
    def constant(cls, cost: float, padding: PaddingOf = NO_PADDING) -> StepCurve:
        """Return a curve whose unit is the duration of a step without drafts, and in which a draft token of each
        sequence takes a fraction `cost` of that, above 0 to 1. Recorded steps do not change it.
        """
        check_cost(cost)
        knots = np.array([1.0, 2.0])
        return cls(knots, lambda sequences: 1 + cost * (knots / sequences - 1), padding, spread=None)

    @classmethod
    def from_table(
        cls,
        sequences: Sequence[int],
        tokens: Sequence[int],
        seconds: np.ndarray,
        padding: PaddingOf = NO_PADDING,
    ) -> StepCurve:
        """Return the curve of measured durations.

        sequences, tokens: ascending. seconds: float64 [sequences, tokens]; durations that decrease with the number of
        tokens were disturbed, and are raised.
        """
        counts, rising = np.array(sequences, np.float64), np.maximum.accumulate(seconds, axis=1)
        knots = np.union1d(usual_knots(), np.array(tokens, np.float64))
        # Below the first size, the slope could be negative.
        table = np.array([extended(np.maximum(knots, tokens[0]), tokens, row) for row in rising])

        def prior(of: int) -> np.ndarray:
            place = float(np.interp(of, counts, np.arange(len(counts))))
            low, share = int(place), place % 1
            between: np.ndarray = (1 - share) * table[low] + share * table[min(low + 1, len(table) - 1)]
            return between

        return cls(knots, prior, padding)

    @property
    def is_learned(self) -> bool:
        """Whether recorded steps change the curve."""
        return self._fit is not None

    def ragged_seconds(self, sequences: int) -> float:
        """Return how much longer a step takes if a sequence has several tokens."""
        return self._fit.ragged_seconds(self._parts_of(sequences)) if self._fit and self._fit.state[STEPS] else 0.0

    def padding(self, sequences: int) -> Padding:
        """Return the shapes that steps with a number of sequences are padded to."""
        return self._padding if isinstance(self._padding, Padding) else self._padding(sequences)

    def seconds(self, tokens: np.ndarray | float, sequences: int) -> np.ndarray:
        """Return the durations of steps, float64 of the shape of `tokens`, without the padding of `Padding.lengths`."""
        ragged = np.where(np.asarray(tokens) > sequences, self.ragged_seconds(sequences), 0.0)
        return ragged + extended(self._padded(tokens, sequences), self.knots, self.row(sequences))

    def _padded(self, tokens: np.ndarray | float, sequences: int) -> np.ndarray:
        """Return the numbers of tokens that the engine runs, of the shape of `tokens`."""
        if not self.padding(sequences).sizes:
            return np.asarray(tokens)
        sizes = np.array(self.padding(sequences).sizes, np.float64)
        place = np.searchsorted(sizes, tokens)
        return np.where(place < len(sizes), np.append(sizes, 0)[place], tokens)

    def step_tokens(self, drafted: np.ndarray, other_tokens: int = 0) -> int:
        """Return the number of tokens of a step, without padding to `Padding.sizes`.

        drafted: int64 [B], lengths of the drafts of its sequences. other_tokens: those of prompts.
        """
        longest, lengths = int(drafted.max(initial=0)), self.padding(len(drafted)).lengths
        if lengths:
            padded = next((length for length in lengths if length >= longest), longest)
            return len(drafted) * (1 + padded) + other_tokens
        return len(drafted) + int(drafted.sum()) + other_tokens

    def record(self, tokens: int, sequences: int, seconds: float) -> bool:
        """Learn from a step that ran; return whether its values are possible. Others are counted and ignored."""
        if not (1 <= sequences <= tokens <= MAX_TOKENS and 0 < seconds <= MAX_SECONDS):
            self.totals.ignored += 1
            return False
        self._steps += 1
        is_ragged = bool(tokens > sequences)
        is_soon = self._steps < self._recorded[is_ragged] + RECORD_EVERY
        if self._fit is None or (self._fit.state[STEPS] >= ALL_STEPS and is_soon):
            return True
        self._recorded[is_ragged] = self._steps
        size = float(self._padded(tokens, sequences))
        expected = record_step(self._fit, self._parts_of(sequences), size, seconds, is_ragged)
        self.totals.sizes[size_of(int(tokens))] += 1, seconds, expected or seconds
        self.row.cache_clear()
        self.revision += 1
        return True

    def _row(self, sequences: int) -> np.ndarray:
        if self._fit is None or not self._fit.state[STEPS]:
            return self._prior(sequences)
        sizes = [sequences * (1 + length) for length in self.padding(sequences).lengths]
        next_size = min((size for size in sizes if size > self._fit.tried), default=0)
        row = np.empty(len(self.knots))
        write_seconds(self._fit, self._parts_of(sequences), next_size, row)
        return row

    def _parts(self, sequences: int) -> np.ndarray:
        """Return the parts of the prior curve, see `parts_of`."""
        return parts_of(self._prior(sequences), float(self._prior(1)[0]), self.knots, sequences)


def usual_knots() -> np.ndarray:
    """Return numbers of tokens at equal ratios, float64; powers of two are among them."""
    octaves = int(np.log2(LARGEST))
    return np.unique(np.round(2.0 ** (np.arange(octaves * KNOTS_PER_OCTAVE + 1) / KNOTS_PER_OCTAVE)))


def measured_curve(
    run: Callable[[int, int], object],
    sizes: Sequence[int],
    sequences: int = 1,
    padding: PaddingOf = NO_PADDING,
) -> StepCurve:
    """Time `run(tokens, sequences)`, a step of `tokens` tokens of each sequence, at ascending sizes of one sequence.

    The time per sequence is measured with one token of each of up to `sequences` sequences.
    """
    run(sizes[0], 1)  # The first call allocates and compiles.
    seconds: list[float] = []
    began = perf_counter()
    while len(seconds) < len(sizes) and (len(seconds) < 2 or perf_counter() - began < MEASURING_S):
        seconds.append(fastest(run, sizes[len(seconds)], 1))
    measured, times = list(sizes[: len(seconds)]), np.array(seconds)
    many = min(sequences, MANY_SEQUENCES)
    if many == 1:
        return StepCurve.from_table([1], measured, times[None], padding)
    of_one = float(StepCurve.from_table([1], measured, times[None]).seconds(many, 1))
    per_sequence = max(0.0, fastest(run, 1, many) - of_one) / (many - 1)
    counts = [1, max(2, sequences)]
    rows = np.array([times + per_sequence * (count - 1) for count in counts])
    return StepCurve.from_table(counts, measured, rows, padding)


def fastest(run: Callable[..., object], *arguments: object) -> float:
    """Return the duration of the fastest of a few calls of `run`, in seconds."""
    found = float("inf")
    for _ in range(REPEATS):
        began = perf_counter()
        run(*arguments)
        found = min(found, perf_counter() - began)
    return found


def extended(at: np.ndarray | float, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> np.ndarray:
    """Interpolate linearly between points of ascending x, and extrapolate with the first and the last slope."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x) == 1:
        return np.full(np.shape(at), y[0])
    right = np.clip(np.searchsorted(x, at), 1, len(x) - 1)
    line: np.ndarray = y[right - 1] + (at - x[right - 1]) * (y[right] - y[right - 1]) / (x[right] - x[right - 1])
    return line
