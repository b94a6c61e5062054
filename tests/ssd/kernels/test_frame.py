"""A kernel sees each array of a frame with the address, the shape and the dtype that its owner gave it."""

import numba
import numpy as np

from ssd.budget.curve import StepCurve
from ssd.budget.token_budget import TokenBudget
from ssd.kernels import frame as frames
from ssd.kernels.fallback import FallbackTable
from ssd.kernels.frame import Frame
from ssd.kernels.learned import LearnedTables
from ssd.sequences.tables import Sequences
from ssd.stats import Stats

PARTS = ("tables", "model", "budget", "counters", "evidence", "counted", "levels", "frontier", "found", "own")


def opened(part, addresses):
    """Return the arrays of a part as a kernel sees them."""
    function = getattr(frames, f"open_{part}")
    found = numba.njit(lambda frame: function(frame))(addresses)
    return [array for each in found for array in ([each] if isinstance(each, np.ndarray) else each)]


def test_parts_begin_where_the_kernels_expect_them():
    frame = Frame(Sequences(3), LearnedTables(), FallbackTable(0.0), TokenBudget(StepCurve.unknown()), Stats())
    assert len(frame.addresses) == frames.TABLES + sum(map(len, frame.parts))
    for part, arrays in zip(PARTS, frame.parts, strict=True):
        for seen, own in zip(opened(part, frame.addresses), arrays, strict=True):
            assert (seen.ctypes.data, seen.shape, seen.dtype) == (own.ctypes.data, own.shape, own.dtype), part
