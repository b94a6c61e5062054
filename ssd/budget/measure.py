"""Measure the step-time curve of an engine before it serves requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from ssd.budget.curve import PaddingOf, StepCurve
from ssd.budget.padding import NO_PADDING

REPEATS = 3
"""Measurements of each size; the fastest one is used, because other load can only make a step slower."""
MEASURING_S = 3.0
"""Time after which no larger size is measured; the curve continues linearly."""
MANY_SEQUENCES = 16
"""Number of sequences in the step that measures the time per sequence."""


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
