"""The state of running sequences, as rows of arrays that kernels read and write.

A row of `state` is a sequence. The same row of `nodes`, `probs`, `candidates` and `estimates` has its last draft with
all candidates that were considered at each node, so that probabilities can be learned from the target's output.
"""

from __future__ import annotations

import time
from typing import Annotated, NamedTuple

import numpy as np

from ssd.corpus.rollout import NO_TAG
from ssd.kernels.arrays import allocate
from ssd.kernels.probabilities import ESTIMATE_COLUMNS, INPUT_CELLS, LOCAL, ROWS
from ssd.sequences.local_index import LocalIndex, Unsorted

# Columns of state, int64.
TEXT, SIZE, ROOM, SORTED, SORTED_SIZE, FRESH, FRESH_SIZE, OWNER, NODES = range(9)
"""Addresses and sizes of a `LocalIndex`; the sequence's number in the live tier; number of nodes of the last draft, its
root included, 0 if there was none."""
POINTERS = 9
"""Three columns for each source: a position or NO_POINTER; correct predictions in a row; misses."""
IS_SHARED = POINTERS + 6
"""1 if other sequences may be offered this one's tokens, else 0."""
TAG = IS_SHARED + 1
"""See `ssd.corpus.rollout.Rollout.tag`."""
IS_SAMPLED, SEED, HINTED = TAG + 1, TAG + 2, TAG + 3
"""See `ssd.kernels.noise.Sampling`."""
SHARED_FROM, PUBLISHED, LIVE_END = HINTED + 1, HINTED + 2, HINTED + 3
"""First token that other sequences may be offered after a match; number of tokens that were published in the live tier,
or left out; place there of the next token, at the end of a block if it begins a new one. See `ssd.kernels.live`."""
TOTALS = LIVE_END + 1
"""Four columns: steps, committed tokens, verified and accepted draft tokens of the sequence."""
STATE_COLUMNS = TOTALS + 4
NO_POINTER = -1
ABSENT = 99
"""Value of MISSES where a source has no pointer."""

# Columns of nodes, int32.
TOKEN, PARENT, DEPTH, SOURCE, AGE, CANDIDATES, WEIGHT_SET = range(7)
"""AGE: log2 of the age in tokens of the match that the node comes from. CANDIDATES: their number, or NOT_ESTIMATED for
a last node, after which nothing may be drafted."""
FALLBACK, LIBRARY = 2, 3
"""SOURCE of fallback candidates, and of those found in libraries, as in `ssd.types.Source`."""
RUNS, MISSES, EVIDENCE, MASKS = 7, 9, 11, 13
"""RUNS and MISSES of both sources' pointers; the search that found each source's evidence; for each level of that
evidence a mask of the samples that agree with the path."""
NODE_COLUMNS = MASKS + ROWS
NOT_ESTIMATED = -1

# Columns of probs, float32: accept_prob and path_prob.
PROB, PATH_PROB = range(2)

# Columns of candidates, int32: the token, where it was found, the cells of its inputs, and its masks.
FOUND_IN, FOUND_LENGTH, FOUND_AGE, CELLS = 1, 2, 3, 4
IN_LIBRARIES = ROWS
"""Value of FOUND_IN for the libraries; it is a row of the evidence for others, -1 for none."""
CANDIDATE_MASKS = CELLS + INPUT_CELLS
CANDIDATE_COLUMNS = CANDIDATE_MASKS + ROWS
KEPT, KEPT_FOR_PATH = 8, 4
"""Maximum number of candidates of a node whose probabilities are estimated, in a tree and in a path."""

MIN_ROWS = 16
SPARE_TOKENS = 512


class Tables(NamedTuple):
    """The tables; the first dimension is a row for each sequence, the second a node of its draft, the root first."""

    state: Annotated[np.ndarray, np.int64, "rows", STATE_COLUMNS]
    nodes: Annotated[np.ndarray, np.int32, "rows", "nodes", NODE_COLUMNS]
    probs: Annotated[np.ndarray, np.float32, "rows", "nodes", 2]
    candidates: Annotated[np.ndarray, np.int32, "rows", "nodes", KEPT, CANDIDATE_COLUMNS]
    estimates: Annotated[np.ndarray, np.float32, "rows", "nodes", KEPT, ESTIMATE_COLUMNS]


class Sequences:
    """The tables, and the local index that each row of `state` refers to."""

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft
        self._locals: list[LocalIndex | None] = []
        self._free: list[int] = []
        self.used = np.zeros(0, np.int64)
        """int64 [rows]: when each sequence began, or was used last, by `time.monotonic_ns`."""
        self.tables = allocate(Tables, rows=0, nodes=max_draft + 1)
        self._grow(MIN_ROWS)

    @property
    def state(self) -> np.ndarray:
        """int64 [rows, STATE_COLUMNS]."""
        return self.tables.state

    def add(
        self,
        local: LocalIndex,
        owner: int,
        *,
        is_predicted: bool = False,
        shared_from: int | None = None,
        tag: int = NO_TAG,
        seed: int | None = None,
        hinted: int = 0,
    ) -> int:
        """Add a sequence with the text of `local`; return its row.

        is_predicted: whether the next tokens are expected to repeat that text from its beginning. shared_from: first
        token of that text that may precede what is offered to other sequences; None: they are offered nothing. tag: see
        `Rollout.tag`. seed: of the target's noise, None if it is not known. hinted: number of tokens of the text that
        precede the prompt.
        """
        if not self._free:
            self._grow(2 * len(self.state))
        local.reserve(self.room_for(local.size))
        row = self._free.pop()
        self._locals[row] = local
        self.state[row] = 0
        self.used[row] = time.monotonic_ns()
        self.state[row, OWNER], self.state[row, TAG], self.state[row, PUBLISHED] = owner, tag, local.size
        if shared_from is not None:
            self.state[row, IS_SHARED], self.state[row, SHARED_FROM] = 1, shared_from
        if seed is not None:
            self.state[row, IS_SAMPLED], self.state[row, SEED], self.state[row, HINTED] = 1, seed, hinted
        self.state[row, [POINTERS, POINTERS + 3]] = NO_POINTER
        if is_predicted:
            self.state[row, POINTERS + 3 * LOCAL] = 0
        self._point_to(row, local)
        return row

    def room_for(self, tokens: int) -> int:
        """Return the room of an index for a text of this many tokens, the next ones and a draft."""
        return tokens + self.max_draft + SPARE_TOKENS

    def make_room(self, row: int, tokens: int) -> None:
        """Make room for `tokens` further tokens of a sequence, and for a draft."""
        local = self.local(row)
        local.reserve(self.room_for(local.size + tokens))
        self._point_to(row, local)

    def extend(self, row: int, tokens: np.ndarray) -> None:
        """Append committed tokens, uint32 [n], to a sequence without a kernel; its last draft ends."""
        local = self.local(row)
        local.extend(tokens)
        self._point_to(row, local)
        self.state[row, NODES] = 0

    def adopt(self, row: int, unsorted: Unsorted) -> None:
        """Add the positions of a sequence's prompt, sorted since it began, see `LocalIndex.adopt`."""
        local = self.local(row)
        local.adopt(unsorted)
        self._point_to(row, local)

    def record_draft(self, row: int, tokens: np.ndarray) -> None:
        """Record a sequence's last draft, a path without candidates; tokens: uint32 [n], at most `max_draft`."""
        self.tables.nodes[row, 1 : 1 + len(tokens), TOKEN] = tokens.view(np.int32)
        self.tables.nodes[row, 1 : 1 + len(tokens), PARENT] = np.arange(len(tokens))
        self.state[row, NODES] = len(tokens) + 1

    def accepted(self, row: int, tokens: np.ndarray, verified: int) -> int:
        """Return how many tokens at the beginning of `tokens`, uint32 [n], are a path of the last draft.

        verified: the number of tokens of the draft, from its beginning, that may be on the path.
        """
        end = min(1 + verified, int(self.state[row, NODES]))
        draft = self.tables.nodes[row, 1:end]
        keys = zip(draft[:, PARENT].tolist(), draft[:, TOKEN].astype(np.uint32).tolist(), strict=True)
        children = {key: node for node, key in enumerate(keys, 1)}
        node = accepted = 0
        for token in tokens.tolist():
            if (node, token) not in children:
                break
            node, accepted = children[node, token], accepted + 1
        return accepted

    def local(self, row: int) -> LocalIndex:
        """Return a sequence's index, with up-to-date sizes."""
        local = self._locals[row]
        assert local is not None, "the row is free"
        state = self.state[row]
        local.size, local.sorted_size, local.fresh_size = (
            int(state[SIZE]),
            int(state[SORTED_SIZE]),
            int(state[FRESH_SIZE]),
        )
        return local

    def remove(self, row: int) -> LocalIndex:
        """Remove a sequence; return its index, which the caller then owns."""
        local = self.local(row)
        self._locals[row] = None
        self._free.append(row)
        return local

    @property
    def nbytes(self) -> int:
        """Memory of the tables and of the running sequences' indices."""
        return sum(table.nbytes for table in self.tables) + sum(local.nbytes for local in self._locals if local)

    def _point_to(self, row: int, local: LocalIndex) -> None:
        state = self.state[row]
        state[TEXT], state[SORTED], state[FRESH] = local.addresses
        state[SIZE], state[ROOM] = local.size, local.room
        state[SORTED_SIZE], state[FRESH_SIZE] = local.sorted_size, local.fresh_size

    def _grow(self, rows: int) -> None:
        before = len(self.state)
        used = np.pad(self.used, (0, rows - before))
        # Zeroed memory of the tables is not allocated until it is written.
        tables = allocate(Tables, rows=rows, nodes=self.max_draft + 1)
        for new, old in zip(tables, self.tables, strict=True):
            new[:before] = old
        # Last, so that nothing has changed if there was not enough memory.
        self.used, self.tables = used, tables
        self._free += range(rows - 1, before - 1, -1)
        self._locals += [None] * (rows - before)
