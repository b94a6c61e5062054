"""The values that learned tables start from."""

import numpy as np

from ssd.kernels.learned import PRIOR_FILE, LearnedTables, start_values, tables_layout
from ssd.kernels.probabilities import FALLBACK_CELLS, FINAL_CELLS, MEAN, SEEN, TOKEN_CELLS


def test_the_file_is_of_these_tables():
    """If it fails because the tables were changed: the learned tables of all existing snapshots are useless, too.

    `python -m benchmarks.priors` makes a new file.
    """
    with np.load(PRIOR_FILE) as learned:
        assert int(learned["layout"]) == tables_layout()
    assert PRIOR_FILE.stat().st_size < 200_000


def test_new_tables_start_with_what_was_learned_of_matches_but_not_of_tokens():
    tables, (formulas, _, weights) = LearnedTables.new(), start_values(None)
    changed = (tables.cells != formulas).any(axis=1)
    assert changed[:TOKEN_CELLS].sum() > 1000
    assert changed[FALLBACK_CELLS:].any()
    assert not changed[TOKEN_CELLS:FINAL_CELLS].any()
    assert (tables.cells[:, SEEN] >= formulas[:, SEEN]).all()
    assert (tables.weights != weights).any()


def test_tables_do_not_share_memory():
    first = LearnedTables.new()
    first.cells[:, MEAN] = 0.5
    assert (LearnedTables.new().cells[:, MEAN] != 0.5).any()


def test_a_file_for_other_tables_is_refused(tmp_path, caplog):
    with np.load(PRIOR_FILE) as learned:
        np.savez(tmp_path / "prior.npz", **{**learned, "layout": np.int64(1)})
    for found, formula in zip(start_values(tmp_path / "prior.npz"), start_values(None), strict=True):
        assert np.array_equal(found, formula)
    assert "was made for other tables" in caplog.text
