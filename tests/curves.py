"""Step-time curves that recorded steps do not change, so that tests are deterministic."""

import numpy as np

from ssd.budget.curve import StepCurve
from ssd.budget.padding import NO_PADDING
from ssd.kernels.budget import MEAN_TIME, MEAN_TOKENS


def curve_of(points, per_sequence=0.0, padding=NO_PADDING):
    """Return a curve through points (tokens, seconds) of one sequence; each further one adds `per_sequence`."""
    knots, seconds = np.array(points, np.float64).T
    return StepCurve(knots, lambda count: seconds + per_sequence * (count - 1), padding, spread=None)


def line(slope, start=1.0):
    """Return a curve whose steps take `start` + `slope` * tokens."""
    return curve_of([(1, start + slope), (2, start + 2 * slope)])


def speedup_of(budget):
    """Return the mean tokens per step of a budget, divided by the mean duration relative to steps without drafts."""
    return float(budget.arrays[-1][MEAN_TOKENS] / budget.arrays[-1][MEAN_TIME])
