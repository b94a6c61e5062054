"""The running requests as a table: one row each, which kernels read and write for a whole batch.

A sequence has a row from its first admission to its end; the row is also its slot in the state on the device.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Generic, Protocol, TypeVar

import numpy as np

from engine.drafters.sources import SOURCE_NAMES

# Columns of the state of a sequence, int64.
SEQUENCE_ID, TEXT, LENGTH, PROMPT, LIMIT, COMPUTED, IN_FLIGHT, PAGES, REGISTERED = range(9)
"""TEXT: address of its tokens. LENGTH: number of committed tokens, prompt and output, of which PROMPT are the prompt's;
LIMIT: the largest LENGTH. COMPUTED: number of leading tokens whose keys and values are in the cache, or are computed by
a step in flight. IN_FLIGHT: largest number of tokens that steps in flight may append. PAGES: number of pages of its
page table; REGISTERED: number of leading ones in the prefix cache."""
MAX_DRAFT, END, KIND, ADMISSION, ON_DEVICE, STEPS = range(9, 15)
"""MAX_DRAFT: largest number of draft tokens in a step. END and KIND: see below. ADMISSION: a number that no other
admission has, by which results of steps are recognized; 0 while it does not run. ON_DEVICE: number of pages in its slot
of the device's state, or ABSENT. STEPS: number of steps that produced tokens."""
DRAFTED = 15
"""One column for each source of draft tokens: how many the target verified."""
ACCEPTED = DRAFTED + len(SOURCE_NAMES)
"""As DRAFTED: how many the target accepted."""
COLUMNS = ACCEPTED + len(SOURCE_NAMES)

# Values of END.
BY_LENGTH, BY_END_TOKENS, BY_REQUEST, SCORED = range(4)
"""The output ends at its largest length, or with an end token of the model before that, or as `Stopping` decides; the
request has no output, but its prompt is scored."""

# Bits of KIND.
SAMPLED, TRUNCATES, NEEDS_HOST, HAS_GRAMMAR = 1, 2, 4, 8
"""Whether its tokens are sampled, with top-k, top-p or min-p; whether the host needs its logits or its tokens; whether
its output must match a grammar."""

ABSENT = -1
NO_ROW = -1
SPARE = 8
"""One spare row for this many, and at least one: rows of sequences that have ended are freed after the next launch."""


class HasRow(Protocol):
    """A sequence that may have a row."""

    row: int
    state: np.ndarray
    """int64 [COLUMNS]: its row of `RequestTable.state`, or its own."""
    page_table: np.ndarray
    """int32: its row of `RequestTable.pages`, or none."""


S = TypeVar("S", bound=HasRow)


class RequestTable(Generic[S]):
    """Rows of up to S sequences that have begun and not ended."""

    def __init__(self, max_sequences: int, max_pages: int) -> None:
        """max_sequences: largest number of sequences that run at once. max_pages: length of a page table."""
        rows = rows_for(max_sequences)
        self.state = np.zeros((rows, COLUMNS), np.int64)
        """int64 [S, COLUMNS]."""
        self.pages = np.zeros((rows, max_pages), np.int32)
        """int32 [S, max_pages]: page tables."""
        self.sequences: list[S | None] = [None] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._admissions = 0

    @property
    def has_room(self) -> bool:
        """Whether a row is free."""
        return bool(self._free)

    def add(self, sequence: S) -> None:
        """Give a row to a sequence that has none."""
        row = self._free.pop()
        self.sequences[row] = sequence
        self.state[row] = sequence.state
        sequence.row, sequence.state, sequence.page_table = row, self.state[row], self.pages[row]

    def admit(self, sequence: S) -> None:
        """Note that a sequence runs from now on."""
        self._admissions += 1
        sequence.state[[ADMISSION, ON_DEVICE]] = self._admissions, ABSENT

    def remove(self, sequence: S) -> None:
        """Free the row of a sequence that has ended, which keeps a copy of its state."""
        row = sequence.row
        self.sequences[row] = None
        sequence.row, sequence.state, sequence.page_table = NO_ROW, sequence.state.copy(), NO_PAGES
        self.state[row] = 0
        self._free.append(row)

    def of(self, rows: np.ndarray) -> SequenceOf[S]:
        """Return the sequences of rows, int64 [B]."""
        return [self.sequences[row] for row in rows.tolist()]


NO_PAGES = np.empty(0, np.int32)


def rows_for(max_sequences: int) -> int:
    """Return the number of rows of a table for this many sequences that run at once."""
    return max_sequences + max(1, max_sequences // SPARE)
