"""The frame of a step: settings of a drafter and the addresses of all arrays that it uses, in one array."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from ssd.budget.token_budget import TokenBudget
from ssd.kernels.arrays import addresses_of, allocate, arrays_in, opener
from ssd.kernels.budget import Budget
from ssd.kernels.evidence import Evidence
from ssd.kernels.fallback import Fallback
from ssd.kernels.grow import Scratch
from ssd.kernels.learned import LearnedTables
from ssd.kernels.match import SPAN_COLUMNS, TIER_COLUMNS
from ssd.kernels.probabilities import SOURCES
from ssd.sequences.tables import Sequences, Tables
from ssd.stats import Counters, Stats

LOCAL_TIERS = 2


class Model(NamedTuple):
    """The learned tables and the counted tokens of a corpus."""

    learned: LearnedTables
    fallback: Fallback


class Own(NamedTuple):
    """Scratch arrays of one sequence."""

    tiers: Annotated[np.ndarray, np.int64, LOCAL_TIERS, TIER_COLUMNS]
    """Tiers of its own text."""
    spans: Annotated[np.ndarray, np.int64, LOCAL_TIERS, SPAN_COLUMNS]
    pointers: Annotated[np.ndarray, np.int64, SOURCES]
    """Addresses of the pointers' next tokens, 0 for none."""
    on_path: Annotated[np.ndarray, np.uint8, "nodes"]
    """1 for accepted nodes."""


class StepArrays(NamedTuple):
    """All arrays of a step."""

    tables: Tables
    model: Model
    budget: Budget
    counters: Counters
    evidence: Evidence
    scratch: Scratch
    own: Own


NUMBERS = ("rows", "nodes", "searches", "match_depth", "is_tree")
"""Numbers before the addresses: sizes of arrays, and settings."""
MATCH_DEPTH, IS_TREE = NUMBERS.index("match_depth"), NUMBERS.index("is_tree")
open_frame = opener(StepArrays, *NUMBERS)
"""Returns the `StepArrays` of `StepFrame.addresses`."""


class StepFrame:
    """The addresses for one drafter; a new one is made when its tables grow."""

    def __init__(
        self,
        sequences: Sequences,
        model: Model,
        budget: TokenBudget,
        stats: Stats,
        *,
        match_depth: int,
        is_tree: bool,
    ) -> None:
        """match_depth: maximum match length in tokens. is_tree: whether a node may have several children."""
        rows, nodes = sequences.tables.probs.shape[:2]
        searches = SOURCES * nodes
        scratch = allocate(Evidence, searches=searches), allocate(Scratch, nodes=nodes), allocate(Own, nodes=nodes)
        self.arrays = StepArrays(sequences.tables, model, budget.arrays, stats.counters, *scratch)
        self.addresses = addresses_of(self.arrays, rows, nodes, searches, match_depth, is_tree)
        """int64."""
        self.nbytes = sum(array.nbytes for array in arrays_in(scratch))
        """Memory of the scratch arrays."""
