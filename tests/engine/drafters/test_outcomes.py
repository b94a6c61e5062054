"""Tables of drafts by outcome."""

import numpy as np
import pytest

from engine.drafters.guard import TABLE_ARRAYS
from engine.drafters.outcomes import OutcomeTable


@pytest.mark.parametrize("at", [[0, 2], [1], []])
def test_scattered_rows_keep_their_drafts_and_the_others_are_unused(at):
    rng = np.random.default_rng(len(at))
    table = OutcomeTable.empty(len(at), 3, 2)
    for name in TABLE_ARRAYS:
        array = getattr(table, name)
        array[:] = rng.integers(1, 9, array.shape)
    scattered = table.scatter(np.array(at, np.int64), 4)
    unused = OutcomeTable.empty(4, 3, 2)
    for name, (dtype, _) in TABLE_ARRAYS.items():
        array = getattr(scattered, name)
        assert array.dtype == dtype
        for row in range(4):
            source = getattr(table, name)[at.index(row)] if row in at else getattr(unused, name)[row]
            assert array[row].tolist() == source.tolist()
