"""The running sequences: what was committed, what the service knows of it, and what it must still be told.

How outcomes are counted. Step by step the engine tells how many tokens of what it was handed it verified and accepted.
The service is told once for all steps since its last draft, of which the engine may have been handed several pieces:

    draft of the service   t0 t1 t2 t3 t4 t5 t6 t7 t8
    handed to the engine   [t0 t1 t2 t3]               verified 4, accepted 4, and the target's own token is t4
                                          [t5 t6 t7 t8]   verified 3, accepted 1
    told to the service    verified 8, accepted 5, steps 2

- `verified` is how long a beginning of the draft the target has judged, never more than the draft had. It includes the
  tokens between the pieces, as t4, which nobody verified: the target produced them itself.
- `accepted` is the sum of what the engine accepted, so those tokens are not part of it. How many they are is how many
  more tokens of the beginning were committed than accepted.
- Of a draft that the engine never got, or got on an earlier connection, nothing was verified.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from drafter_service.client.about import About
from drafter_service.client.at_hand import AtHand
from drafter_service.client.ended import Ended
from drafter_service.client.texts import Texts
from ssd.draft import Progress, offsets_of

LEAST_ROWS = 16

# Lines of the table, int64.
COMMITTED, TOLD, OFFERED, VERIFIED, ACCEPTED, STEPS, WIRE_ID, IS_KNOWN, IS_COUNTED = range(9)
"""COMMITTED: tokens beyond the prompt; TOLD: how many of them the service has been told; OFFERED: how many tokens the
engine was handed last. VERIFIED, ACCEPTED, STEPS: what the service has to be told of. WIRE_ID: what the service calls
the sequence, a number that none had before, so that nothing old is taken for it. IS_KNOWN: whether the service has it.
IS_COUNTED: whether what the engine was handed is of the service's last draft."""
LINES = 9
COUNTS = slice(VERIFIED, STEPS + 1)


@dataclass(frozen=True, eq=False)
class News:
    """What the service has not been told of B sequences."""

    wire_ids: np.ndarray
    """int64 [B]."""
    tokens: np.ndarray
    """uint32 [T]."""
    offsets: np.ndarray
    """uint32 [B + 1]."""
    counts: np.ndarray
    """int64 [3, B]: verified, accepted, steps."""


class Running:
    """A row of several tables for each running sequence."""

    def __init__(self) -> None:
        self.row_of: dict[int, int] = {}
        """By the engine's id."""
        self.at_hand = AtHand()
        self._table = np.zeros((LINES, 0), np.int64)
        self._texts = Texts()
        self._about: list[About | None] = []
        self._free: list[int] = []

    def add(self, sequence_id: int, about: About) -> int:
        """A sequence begins; returns its row."""
        if not self._free:
            self._grow(max(LEAST_ROWS, 2 * len(self._about)))
        row = self._free.pop()
        self.row_of[sequence_id] = row
        self._about[row] = about
        self._texts.clear(row)
        self._table[:, row] = 0
        self.at_hand.drop(np.array([row]))
        return row

    def end(self, sequence_id: int, learn: bool) -> Ended:
        """A sequence is over; what has to be told of it."""
        row = self.row_of.pop(sequence_id)
        _, told, _, verified, accepted, steps, wire_id, is_known, _ = self._table[:, row].tolist()
        about = self.about(row)
        ended = Ended(
            about,
            committed=self._texts.text(row),
            wire_id=wire_id,
            is_known=bool(is_known),
            told=told,
            learn=learn and about.learn,
            verified=verified,
            accepted=accepted,
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

    def size(self, row: int) -> int:
        """Tokens of a sequence, prompt included."""
        return len(self.about(row).prompt) + int(self._table[COMMITTED, row])

    def offered(self, rows: np.ndarray) -> np.ndarray:
        """How many tokens the engine was handed last, int64 [B]."""
        return self._table[OFFERED, rows]

    def is_known(self, rows: np.ndarray) -> np.ndarray:
        """Whether the service has these sequences, bool [B]."""
        known: np.ndarray = self._table[IS_KNOWN, rows] != 0
        return known

    def commit(self, rows: np.ndarray, progress: Progress) -> None:
        """Take note of what was committed and of what became of what the engine was handed."""
        offsets = progress.offsets.astype(np.int64)
        counts = offsets[1:] - offsets[:-1]
        table = self._table[:, rows]
        begins = self.at_hand.begins[rows] if self.at_hand.count else 0
        np.maximum(table[VERIFIED], (begins + progress.verified) * table[IS_COUNTED], out=table[VERIFIED])
        table[ACCEPTED] += progress.accepted * table[IS_COUNTED]
        table[STEPS] += counts > 0
        table[COMMITTED] += counts
        self._table[:, rows] = table
        self._texts.append(rows, progress.tokens, offsets)
        self.at_hand.advance(rows, progress.tokens, offsets, progress.cost)

    def tell(self, rows: np.ndarray) -> News:
        """All that the service does not know of known sequences; from now on it does. Their drafts are void."""
        table = self._table[:, rows]
        counts = table[COUNTS].copy()
        untold = table[COMMITTED] - table[TOLD]
        offsets = offsets_of(untold)
        tokens = self._texts.last(rows, untold, offsets.astype(np.int64))
        table[TOLD] = table[COMMITTED]
        table[COUNTS] = 0
        table[IS_COUNTED] = 0
        self._table[:, rows] = table
        self.at_hand.drop(rows)
        return News(table[WIRE_ID], tokens, offsets, counts)

    def introduce(self, row: int, wire_id: int) -> np.ndarray:
        """The service is told of a sequence, all of it; returns what was committed since it began, uint32."""
        table = self._table[:, row]
        table[COUNTS] = 0
        table[IS_COUNTED] = 0
        table[WIRE_ID], table[TOLD], table[IS_KNOWN] = wire_id, table[COMMITTED], 1
        return self._texts.text(row)

    def hand_over(self, rows: np.ndarray, sizes: np.ndarray) -> None:
        """The engine was handed so many tokens for each sequence, int64 [B]."""
        self._table[OFFERED, rows] = sizes

    def expect_counts(self, rows: np.ndarray) -> None:
        """The service's last drafts of these are what the engine will be handed."""
        self._table[IS_COUNTED, rows] = 1

    def lose(self, wire_ids: Collection[int]) -> int:
        """The service does not know these any more; returns how many of them run."""
        if not wire_ids:
            return 0
        known = self._known_rows()
        lost = known[np.isin(self._table[WIRE_ID, known], list(wire_ids))]
        self._table[IS_KNOWN, lost] = 0
        self._disregard(lost)
        return len(lost)

    def resume(self, sizes: Mapping[int, int]) -> int:
        """After a new connection only sequences in `sizes` are known: tokens, prompt included, by wire id.

        Returns how many the service has lost.
        """
        self._disregard(np.array(list(self.row_of.values()), np.int64))
        lost = 0
        for row in self._known_rows().tolist():
            table = self._table[:, row]
            table[TOLD] = sizes.get(int(table[WIRE_ID]), 0) - len(self.about(row).prompt)
            table[IS_KNOWN] = 0 <= table[TOLD] <= table[COMMITTED]
            lost += not table[IS_KNOWN]
        return lost

    def known_wire_ids(self) -> set[int]:
        """Of the sequences that the service has."""
        return {*self._table[WIRE_ID, self._known_rows()].tolist()}

    def _known_rows(self) -> np.ndarray:
        rows = np.array(list(self.row_of.values()), np.int64)
        return rows[self.is_known(rows)]

    def _disregard(self, rows: np.ndarray) -> None:
        """Whatever the engine was handed so far is not of the service's last draft."""
        self._table[IS_COUNTED, rows] = 0
        self._table[VERIFIED, rows] = 0
        self._table[ACCEPTED, rows] = 0

    def _grow(self, rows: int) -> None:
        before = len(self._about)
        self._table = np.pad(self._table, ((0, 0), (0, rows - before)))
        self._texts.grow(rows)
        self.at_hand.grow(rows)
        self._about += [None] * (rows - before)
        self._free += range(rows - 1, before - 1, -1)
