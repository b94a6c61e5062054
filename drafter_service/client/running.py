"""The running sequences: what was committed, what the service knows of it, and what it must still be told.

Several steps may pass before the service is told again, as while it is late. Then `verified` is what the first of these
steps verified of the service's last draft: the later ones had none. Of a draft that the engine never got, or got on an
earlier connection, nothing was verified.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from drafter_service.client.about import About
from drafter_service.client.ended import Ended
from drafter_service.client.texts import Texts
from ssd.config import check_cost
from ssd.corpus.ring import check_tokens
from ssd.types import Progress, offsets_of

LEAST_ROWS = 16

# Lines of the table, int64.
UNTOLD, OFFERED, VERIFIED, ACCEPTED, STEPS, WIRE_ID, PROMPT, IS_KNOWN, IS_COUNTED, IS_PLAIN, IS_WANTED = range(11)
"""UNTOLD: how many of the committed tokens the service has not been told. OFFERED: how many tokens the engine was
handed last. VERIFIED, ACCEPTED, STEPS: what the service has to be told of. WIRE_ID: what the service calls it, a number
that no sequence had before, so that nothing old is taken for it. PROMPT: tokens of its prompt. IS_KNOWN: whether the
service has it. IS_COUNTED: whether what the engine was handed is of the service's last draft. IS_PLAIN: whether it is
known and counted, and nothing is untold. IS_WANTED: whether drafts were asked for since it was not known any more."""
LINES = 11


@dataclass(frozen=True, eq=False)
class News:
    """What the service has not been told of B sequences."""

    wire_ids: np.ndarray
    """int64 [B]."""
    tokens: np.ndarray
    """uint32 [T]."""
    offsets: np.ndarray
    """uint32 [B + 1]."""
    verified: np.ndarray
    """Whole numbers [B]."""
    steps: np.ndarray | None = None
    """int64 [B]; None: one each."""


class Running:
    """A row of several tables for each running sequence."""

    def __init__(self) -> None:
        self.row_of: dict[int, int] = {}
        """By the engine's id."""
        self.may_want = False
        """Whether there may be `wanted` ones."""
        self._table = np.zeros((LINES, 0), np.int64)
        self._texts = Texts()
        self._about: list[About | None] = []
        self._free: list[int] = []
        self._last_named: bytes | None = None
        """The ids of the last batch, and its rows: most often the next one has the same."""
        self._last_rows = np.zeros(0, np.int64)

    def rows_of(self, progress: Progress) -> np.ndarray:
        """Rows of the sequences of a batch, int64 [B], not to be changed. Raises ValueError as `Progress.check`."""
        named = progress.sequence_ids.tobytes()
        if named != self._last_named:
            ids = progress.sequence_ids.tolist()
            if len({*ids}) < len(ids) or not self.row_of.keys() >= {*ids}:
                self._refuse(progress)
            self._last_rows = np.array([self.row_of[sequence_id] for sequence_id in ids], np.int64)
            self._last_named = named
        rows = self._last_rows
        if np.count_nonzero(progress.verified > self._table[OFFERED, rows]):
            self._refuse(progress)
        check_tokens(progress.tokens)
        if progress.cost is not None:
            check_cost(progress.cost)
        return rows

    def add(self, sequence_id: int, about: About) -> int:
        """A sequence begins; returns its row."""
        self._last_named = None
        if not self._free:
            self._grow(max(LEAST_ROWS, 2 * len(self._about)))
        row = self._free.pop()
        self.row_of[sequence_id] = row
        self._about[row] = about
        self._texts.clear(row)
        self._table[:, row] = 0
        self._table[PROMPT, row] = len(about.prompt)
        return row

    def end(self, sequence_id: int, learn: bool) -> Ended:
        """A sequence is over; what has to be told of it."""
        row = self.row_of.pop(sequence_id)
        self._last_named = None
        untold, _, verified, _, steps, wire_id, _, is_known, *_ = self._table[:, row].tolist()
        about, committed = self.about(row), self._texts.text(row)
        ended = Ended(
            about,
            committed=committed,
            wire_id=wire_id,
            is_known=bool(is_known),
            told=len(committed) - untold,
            learn=learn and about.learn,
            verified=verified,
            steps=steps,
        )
        self._about[row] = None
        self._texts.clear(row)
        self._free.append(row)
        return ended

    def about(self, row: int) -> About:
        """What the sequence in a row began with."""
        about = self._about[row]
        assert about is not None, "the row is free"
        return about

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of sequences, prompts included, int64 [B]."""
        sizes: np.ndarray = self._table[PROMPT, rows] + self._texts.sizes(rows)
        return sizes

    def want(self, rows: np.ndarray) -> None:
        """These are not known, and drafts are asked for."""
        self._table[IS_WANTED, rows] = 1
        self.may_want = self.may_want or len(rows) > 0

    def wanted(self) -> np.ndarray:
        """Those that the service should be told of, int64 [W], in the order in which they began."""
        rows = np.array(list(self.row_of.values()), np.int64)
        wanted = rows[(self._table[IS_WANTED, rows] != 0) & ~self.is_known(rows)]
        self.may_want = len(wanted) > 0
        return wanted

    def load(self) -> tuple[int, int]:
        """How many sequences the service has, and at most how many tokens of them."""
        known = self._known_rows()
        return len(known), int(self.sizes(known).sum())

    def offered(self, rows: np.ndarray) -> np.ndarray:
        """How many tokens the engine was handed last, int64 [B]."""
        return self._table[OFFERED, rows]

    def is_known(self, rows: np.ndarray) -> np.ndarray:
        """Whether the service has these sequences, bool [B]."""
        known: np.ndarray = self._table[IS_KNOWN, rows] != 0
        return known

    def is_plain(self, rows: np.ndarray) -> bool:
        """Whether all that is to be told of these sequences is what the engine says now: the usual case."""
        return bool(0 < len(rows) == np.count_nonzero(self._table[IS_PLAIN, rows]))

    def pass_on(self, rows: np.ndarray, progress: Progress) -> News:
        """What `commit` and `tell` do for sequences that are plain."""
        self._texts.append(rows, progress.tokens, progress.offsets)
        wire_ids = self._table[WIRE_ID, rows]
        return News(wire_ids, progress.tokens, progress.offsets, progress.verified, progress.steps)

    def commit(self, rows: np.ndarray, progress: Progress) -> None:
        """Take note of what was committed and of what became of what the engine was handed."""
        offsets = progress.offsets.astype(np.int64)
        counts = offsets[1:] - offsets[:-1]
        table = self._table[:, rows]
        # Steps after the first one have no draft of the service, so nothing of it was verified in them.
        table[VERIFIED] += progress.verified * table[IS_COUNTED]
        table[STEPS] += (counts > 0) * (1 if progress.steps is None else np.maximum(progress.steps, 1))
        table[UNTOLD] += counts
        table[IS_PLAIN] = 0
        self._table[:, rows] = table
        self._texts.append(rows, progress.tokens, offsets)

    def tell(self, rows: np.ndarray) -> News:
        """All that the service does not know of known sequences; from now on it does."""
        untold, _, verified, _, steps, wire_ids, *_ = self._table[:, rows]
        offsets = offsets_of(untold)
        tokens = self._texts.last(rows, offsets.astype(np.int64))
        self._make_plain(rows)
        return News(wire_ids, tokens, offsets, verified, np.maximum(steps, 1))

    def introduce(self, row: int, wire_id: int) -> np.ndarray:
        """The service is told of a sequence, all of it; returns what was committed since it began, uint32."""
        self._table[WIRE_ID, row] = wire_id
        self._table[IS_WANTED, row] = 0
        self._make_plain(np.array([row]))
        return self._texts.text(row)

    def hand_over(self, rows: np.ndarray, sizes: np.ndarray) -> None:
        """The engine is handed so many tokens for each sequence, int64 [B]."""
        self._table[OFFERED, rows] = sizes
        self._texts.tidy()

    def lose(self, wire_ids: Collection[int]) -> int:
        """The service does not know these any more; returns how many of them run."""
        if not wire_ids:
            return 0
        known = self._known_rows()
        lost = known[np.isin(self._table[WIRE_ID, known], list(wire_ids))]
        self._disregard(lost)
        self._table[IS_KNOWN, lost] = 0
        self.want(lost)
        return len(lost)

    def resume(self, sizes: Mapping[int, int]) -> int:
        """After a new connection only sequences in `sizes` are known: tokens, prompt included, by wire id.

        Returns how many the service has lost.
        """
        self._disregard(np.array(list(self.row_of.values()), np.int64))
        lost = 0
        for row in self._known_rows().tolist():
            told = sizes.get(int(self._table[WIRE_ID, row]), 0) - len(self.about(row).prompt)
            committed = int(self._texts.sizes(np.array([row]))[0])
            is_known = 0 <= told <= committed
            self._table[[UNTOLD, IS_KNOWN], row] = committed - told, is_known
            lost += not is_known
        return lost

    def known_wire_ids(self) -> set[int]:
        """Of the sequences that the service has."""
        return {*self._table[WIRE_ID, self._known_rows()].tolist()}

    def _refuse(self, progress: Progress) -> NoReturn:
        """Say what is wrong with a batch."""
        rows = np.array(list(self.row_of.values()), np.int64)
        progress.check(dict(zip(self.row_of, self.offered(rows).tolist(), strict=True)))
        raise AssertionError("nothing is wrong with the batch")

    def _known_rows(self) -> np.ndarray:
        rows = np.array(list(self.row_of.values()), np.int64)
        return rows[self.is_known(rows)]

    def _disregard(self, rows: np.ndarray) -> None:
        """Whatever the engine was handed so far is not of the service's last draft."""
        for line in (IS_COUNTED, IS_PLAIN, VERIFIED, ACCEPTED):
            self._table[line, rows] = 0

    def _make_plain(self, rows: np.ndarray) -> None:
        """The service knows all of these; what the engine is handed from now on is of the draft that it makes next."""
        for line in (UNTOLD, VERIFIED, ACCEPTED, STEPS):
            self._table[line, rows] = 0
        for line in (IS_KNOWN, IS_COUNTED, IS_PLAIN):
            self._table[line, rows] = 1

    def _grow(self, rows: int) -> None:
        before = len(self._about)
        self._table = np.pad(self._table, ((0, 0), (0, rows - before)))
        self._texts.grow(rows)
        self._about += [None] * (rows - before)
        self._free += range(rows - 1, before - 1, -1)
