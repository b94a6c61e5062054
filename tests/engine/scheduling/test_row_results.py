"""Compare the arrays of a step's results with an object per sequence."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.scheduling.plan import StepPlan
from engine.scheduling.request import Request
from engine.scheduling.row_results import ResultArrays, RowResults
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import RequestTable
from ssd.types import offsets_of

WIDTH = 5
"""Longest output of a step, with drafts of up to four tokens."""


def results_of(seed):
    """Return random results, and the table that they refer to."""
    rng = np.random.default_rng(seed)
    table = RequestTable(8, 4)
    for sequence_id in rng.permutation(90)[: rng.integers(1, 9)].tolist():
        table.add(Sequence(sequence_id, Request(np.ones(3, np.uint32)), 99))
    used = [sequence.row for sequence in table.sequences if sequence is not None]
    rows = rng.permutation(used)[: rng.integers(0, len(used) + 1)].astype(np.int64)
    sizes = rng.integers(0, WIDTH, len(rows))
    tokens, source = rng.integers(1, 9, (2, sizes.sum()))
    drafts = SimpleNamespace(tokens=tokens.astype(np.uint32), source=source.astype(np.uint8), offsets=offsets_of(sizes))
    lengths = rng.integers(0, sizes + 1)
    plan = StepPlan([], table, rows, drafts if rng.random() < 0.8 else None, lengths if rng.random() < 0.8 else sizes)
    padded = np.zeros((len(rows) + rng.integers(0, 3), 2 + WIDTH), np.int32)
    values = padded[: len(rows)]
    values[:, 1] = rng.integers(0, plan.lengths + 1) if plan.drafts else 0
    values[:, 0] = 1 + rng.integers(0, values[:, 1] + 1)
    values[:, 2:] = rng.integers(1, 99, (len(rows), WIDTH))
    results = RowResults(plan, padded, np.full(len(rows), 3))
    # Some sequences had ended before, and some outputs end within the step's tokens.
    for index, kept in enumerate(rng.integers(0, values[:, 0] + 1).tolist()):
        results.add(index, kept)
    return results, table


@pytest.mark.parametrize("seed", range(60))
def test_arrays_equal_those_of_an_object_per_sequence(seed):
    results, table = results_of(seed)
    expected = ResultArrays.of(list(results))
    assert results.counts[:3] == (len(expected.ids), len(expected.tokens), expected.accepted.sum())
    for sequence in [each for each in table.sequences if each is not None]:
        table.remove(sequence)  # Results stay as they were.
    for name, found, wanted in zip(ResultArrays._fields, results.arrays, expected, strict=True):
        assert np.array_equal(found, wanted) if name != "logprobs" else found == wanted == {}, name
        assert name == "logprobs" or found.dtype == wanted.dtype
