"""The token budget: which draft tokens of a batch are verified, given a step-time curve and their probabilities."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ssd.budget.backoff import MEASURED_RUNS, Backoff
from ssd.budget.curve import MAX_SECONDS, StepCurve
from ssd.budget.padding import NO_PADDING, Padding
from ssd.budget.totals import BudgetTotals
from ssd.kernels.arrays import addresses_of, allocate
from ssd.kernels.budget import (
    KNOTS,
    LENGTHS,
    RAGGED,
    SEQUENCES,
    SIZES,
    START_STATE,
    TOKENS,
    WITHHELD,
    Budget,
    drafts_outcome,
    largest_saving,
    record_rate,
    saved_steps,
    seconds_of,
    select_drafts,
    step_price,
)
from ssd.types import ONE_EACH, Progress

constant_curve = lru_cache(16)(StepCurve.constant)
"""Returns the curve of a cost that is given instead of the engine's curve."""


class StepPrice(NamedTuple):
    """Prices of draft tokens and of time in a step."""

    tokens_per_second: float
    """Mean rate of its sequences."""
    min_path_prob: float
    """Smallest path probability of a token to draft."""

    def is_worthwhile(self, tokens: float, seconds: float) -> bool:
        """Return whether an expected number of tokens is worth a time, in the unit of the curve."""
        return tokens > self.tokens_per_second * seconds


class TokenBudget:
    """Selects draft tokens for one engine. One thread at a time may use it."""

    def __init__(self, curve: StepCurve) -> None:
        """Raise ValueError for a curve with too many knots or padded shapes."""
        self.curve = curve
        self.arrays = allocate(Budget)
        self.arrays.state[:] = START_STATE
        self.addresses = addresses_of(self.arrays)
        """Argument of the kernels of `ssd.kernels.budget`."""
        self._backoff = Backoff(runs=MEASURED_RUNS if curve.is_learned else None)
        self._shown: tuple[object, ...] = ()
        """Contents of the arrays: cost or revision of the curve, and number of sequences."""
        self._shapes: tuple[np.ndarray, Padding] = (np.empty(0), NO_PADDING)
        """Knots and padding in the arrays."""
        self.prepare(1)

    def prepare(self, sequences: int, other_tokens: int = 0, cost: float | None = None) -> None:
        """Describe the next step: its sequences, and its tokens beside one of each sequence and the drafts.

        cost: instead of the curve's, the time that a draft token of each sequence takes, as a fraction of a step
        without drafts. Raises ValueError for a cost outside (0, 1].
        """
        sequences = max(1, sequences)
        shown = (cost, self.curve.revision if cost is None else 0, sequences)
        if shown != self._shown:
            self._write(self.curve if cost is None else constant_curve(cost), sequences)
            self.arrays.facts[SEQUENCES] = sequences
            self._shown = shown
        self.arrays.facts[TOKENS] = sequences + other_tokens

    @property
    def tokens_per_second(self) -> float:
        """Mean rate of the sequences of the step, in tokens per unit of time of the curve."""
        return float(step_price(self.addresses, 0)[0])

    @property
    def totals(self) -> BudgetTotals:
        """Totals of the curve, and of the draft tokens that were not worth verifying."""
        recorded = self.curve.totals
        return BudgetTotals(recorded.sizes.copy(), recorded.ignored, int(self.arrays.state[WITHHELD]))

    def seconds(self, tokens: int) -> float:
        """Return the expected duration of the step with `tokens` tokens in all."""
        return float(seconds_of(self.addresses, tokens))

    def price(self, max_draft: int) -> StepPrice:
        """Return the price of the step; max_draft: maximum number of draft tokens of all sequences together."""
        rate, least = step_price(self.addresses, max_draft)
        return StepPrice(rate, min(1.0, least))

    def select(self, path_probs: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return how many tokens of each draft to verify, counted from its first, int64 [B].

        path_probs: float32 [T], not ascending within a draft. offsets: int64 [B + 1], into `path_probs`.
        """
        lengths = np.empty(len(offsets) - 1, np.int64)
        select_drafts(self.addresses, path_probs, offsets, lengths)
        return lengths

    def record(self, sequences: int, committed: float, verified: int, drafting_s: float = 0.0) -> None:
        """Update the mean rate with a step in which drafts were requested for `sequences` of its sequences.

        committed: number of tokens that these produced. verified: number of their verified draft tokens. drafting_s:
        time by which drafting delayed the step, in the unit of the curve.
        """
        record_rate(self.addresses, sequences, committed, verified, drafting_s)

    def saved(self, accepted: int, tokens: int, drafted: int) -> float:
        """Return the time that the drafts of a step saved, as a multiple of that of one token of each sequence.

        accepted: number of accepted draft tokens. tokens: all of the step, of which `drafted` are draft tokens.
        """
        return float(saved_steps(self.addresses, accepted, tokens, drafted))

    def largest_saving(self, longest: int, rows: int, position: float) -> float:
        """Return the largest time that drafts can save in a step, in which all draft tokens are accepted, as `saved`.

        longest: largest number of draft tokens of a sequence. rows: number of further rows that the step runs for the
        drafter. position: time of drafting one token of each sequence, as a multiple of that of a step without drafts.
        """
        return float(largest_saving(self.addresses, longest, rows, position))

    def learn(self, progress: Progress) -> int:
        """Learn from the steps that an engine has run; return `DraftBatch.pause_steps`.

        progress: what the last of these steps committed.
        """
        are_possible = [self.curve.record(step.tokens, step.sequences, step.seconds) for step in progress.step_times]
        step, drafting_s = progress.step_times[-1], sum(step.drafting_s for step in progress.step_times)
        if not (are_possible[-1] and 0 < drafting_s <= MAX_SECONDS):
            return 0
        self.prepare(step.sequences)
        steps = ONE_EACH if progress.steps is None else progress.steps
        taken, saved, longer = drafts_outcome(self.addresses, progress.offsets, progress.verified, steps, step.tokens)
        if not taken:
            return 0
        if self._backoff.is_stopped:
            self._backoff.end_pause()
            return 0
        # The curve may have another unit than seconds.
        self._backoff.record_drafts(saved, drafting_s / step.seconds * longer)
        return self._backoff.pause_steps

    def _write(self, curve: StepCurve, sequences: int = 1) -> None:
        """Copy a curve into the arrays. Raises ValueError if it does not fit."""
        shapes = curve.knots, curve.padding(sequences)
        if shapes[0] is not self._shapes[0] or shapes[1] != self._shapes[1]:
            self._write_shapes(*shapes)
            self._shapes = shapes
        self.arrays.seconds[: len(curve.knots)] = curve.row(sequences)
        self.arrays.state[RAGGED] = curve.ragged_seconds(sequences)

    def _write_shapes(self, knots: np.ndarray, padding: Padding) -> None:
        """Copy what is the same in most steps. Raises ValueError as `_write`."""
        for index, array, values in (
            (KNOTS, self.arrays.knots, knots),
            (SIZES, self.arrays.sizes, padding.sizes),
            (LENGTHS, self.arrays.lengths, padding.lengths),
        ):
            if len(values) > len(array):
                raise ValueError(f"a step-time curve has {len(values)} sizes; at most {len(array)} are supported")
            array[: len(values)] = values
            self.arrays.facts[index] = len(values)
