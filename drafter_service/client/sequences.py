"""The running sequences of a client: their tokens, and which of these were sent to the service.

A sequence is *registered* once its prompt and the tokens committed until then were sent. It is *current* if, in
addition, no token is unsent and the engine's last draft is the service's last draft. Usually all sequences of a batch
are current, and their progress is forwarded unchanged.

Several engine steps may pass before a sequence is current again, for example while the service is late. They are then
sent together: `steps` is their number, and `verified` is the number of tokens of the service's last draft that the
first of them verified; the others had no draft. Drafts from an earlier connection count as not verified.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from drafter_service.client.history import TokenHistory
from drafter_service.transport.wire import pack
from ssd.config import check_cost
from ssd.corpus.ring import any_of, check_tokens
from ssd.corpus.rollout import Rollout
from ssd.types import Progress, check_path_prob, offsets_of

MIN_ROWS = 16

# Indices of the first axis of the table, int64; the second axis is the row of a sequence.
UNSENT, OFFERED, VERIFIED, STEPS, WIRE_ID, PROMPT, IS_REGISTERED, IS_COUNTED, IS_CURRENT = range(9)
"""UNSENT: committed tokens that were not sent. OFFERED: tokens of the draft that the engine received last.
VERIFIED, STEPS: sent with the unsent tokens. WIRE_ID: id of the sequence at the service, never used twice, so that
no response about an earlier sequence applies to it. PROMPT: tokens of the prompt and its hints. IS_COUNTED: whether the
engine's last draft is the service's last draft for the sequence."""
LINES = 9


@dataclass(frozen=True, eq=False)
class SequenceInfo:
    """Arguments of a sequence's start, kept to register it again."""

    prompt: np.ndarray
    """uint32 [P]."""
    hints: np.ndarray
    """uint32 [H]."""
    session_id: str
    request_id: str
    """The service learns the sequence under this name, once."""
    learn: bool
    """Whether it may be learned, or used for drafts of other sequences while it runs."""
    shadow: bool = False
    """Whether the service withholds its drafts."""
    rollout: Rollout | None = None
    """What it samples; None if it is no rollout."""
    seed: int | None = None
    """Seed of the target's noise; None: greedy, or not known."""

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.hints) + len(self.prompt)


@dataclass(eq=False)
class UnconfirmedEnd:
    """A finished sequence whose end the service has not confirmed."""

    info: SequenceInfo
    committed: np.ndarray
    """uint32 [n]: all committed tokens."""
    wire_id: int
    is_registered: bool
    sent: int
    """Number of tokens of `committed` that were sent."""
    learn: bool
    verified: int
    steps: int

    @property
    def size(self) -> int:
        """Number of tokens, prompt included."""
        return self.info.size + len(self.committed)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens, prompt included."""
        return 4 * self.size

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the unsent tokens."""
        return 4 * (len(self.committed) - self.sent) if self.is_registered else self.nbytes

    def unregister(self) -> None:
        """Record that the service has lost the sequence."""
        self.is_registered = False
        self.sent = self.verified = 0


@dataclass(slots=True, eq=False)
class KnownBatch:
    """Data of the sequences of a batch, kept because the next batch usually has the same sequences."""

    ids_as_bytes: bytes
    """The engine's ids."""
    rows: np.ndarray
    """int64 [B], read-only: rows of the sequences."""
    wire_ids: bytes
    """u64 [B], as in messages: ids of the sequences at the service."""
    offered: np.ndarray
    """uint32 [B]: number of tokens of the draft that the engine received last."""
    are_current: bool
    """Whether all sequences are current."""


class RunningSequences:
    """Assigns a row of the tables to each running sequence."""

    def __init__(self, vocab_size: int = 0) -> None:
        """vocab_size: of the model; 0 if it is not known."""
        self._vocab_size = vocab_size
        self.row_of: dict[int, int] = {}
        """Rows by the engine's sequence id, in the order of the starts."""
        self.has_unregistered = False
        """Whether `unregistered` may be non-empty."""
        self._table = np.zeros((LINES, 0), np.int64)
        self._history = TokenHistory()
        self._infos: list[SequenceInfo | None] = []
        self._free: list[int] = []
        self._last: KnownBatch | None = None
        """The last batch, whose values of OFFERED are not in the table; None if anything but the drafts of its
        sequences has changed since."""

    def batch_of(self, progress: Progress) -> KnownBatch:
        """Return the data of the sequences of a batch. Raises ValueError as `Progress.check`."""
        progress.check_arrays()
        batch, ids_as_bytes = self._last, progress.sequence_ids.tobytes()
        if batch is None or ids_as_bytes != batch.ids_as_bytes:
            self._end_batch()
            ids = progress.sequence_ids.tolist()
            if len({*ids}) < len(ids):
                self._refuse(progress)
            rows = self.rows(ids)
            table = self._table.take(rows, axis=1)
            are_current = bool(0 < len(ids) == np.count_nonzero(table[IS_CURRENT]))
            batch = KnownBatch(
                ids_as_bytes, rows, pack(table[WIRE_ID], "u8"), table[OFFERED].astype(np.uint32), are_current
            )
        if any_of(progress.verified > batch.offered):
            self._refuse(progress)
        check_tokens(progress.tokens, self._vocab_size)
        if progress.cost is not None:
            check_cost(progress.cost)
        if progress.min_path_prob is not None:
            check_path_prob(progress.min_path_prob)
        self._last = batch
        return batch

    def rows(self, sequence_ids: list[int]) -> np.ndarray:
        """Return the rows of sequences, int64 [B]. Raises ValueError for one that was not started."""
        try:
            return np.fromiter(map(self.row_of.__getitem__, sequence_ids), np.int64, len(sequence_ids))
        except KeyError as missing:
            raise ValueError(f"sequence {missing.args[0]} was not started") from None

    def add(self, sequence_id: int, info: SequenceInfo) -> int:
        """Add an unregistered sequence; return its row."""
        self._end_batch()
        if not self._free:
            self._grow(max(MIN_ROWS, 2 * len(self._infos)))
        row = self._free.pop()
        self.row_of[sequence_id] = row
        self._infos[row] = info
        self._history.clear(row)
        self._table[:, row] = 0
        self._table[PROMPT, row] = info.size
        return row

    def remove(self, sequence_id: int, learn: bool) -> UnconfirmedEnd:
        """Remove a sequence that has ended."""
        row = self.row_of.pop(sequence_id)
        self._end_batch()
        unsent, _, verified, steps, wire_id, _, is_registered, *_ = self._table[:, row].tolist()
        info, committed = self.info(row), self._history.tokens(row)
        finished = UnconfirmedEnd(
            info,
            committed=committed,
            wire_id=wire_id,
            is_registered=bool(is_registered),
            sent=len(committed) - unsent,
            learn=learn and info.learn,
            verified=verified,
            steps=steps,
        )
        self._infos[row] = None
        self._history.clear(row)
        self._free.append(row)
        return finished

    def info(self, row: int) -> SequenceInfo:
        """Return the arguments of the start of the sequence in a row."""
        info = self._infos[row]
        assert info is not None, "the row is free"
        return info

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sequence, prompt included, int64 [B]."""
        sizes: np.ndarray = self._table[PROMPT, rows] + self._history.sizes(rows)
        return sizes

    def unregistered(self) -> np.ndarray:
        """Return the rows of unregistered sequences, int64 [U], in the order of their starts."""
        rows = self._rows()
        unregistered: np.ndarray = rows[~self.are_registered(rows)]
        self.has_unregistered = len(unregistered) > 0
        return unregistered

    def load(self) -> tuple[int, int]:
        """Return the number of registered sequences, and an upper bound of their tokens at the service."""
        registered = self._registered_rows()
        return len(registered), int(self.sizes(registered).sum())

    def offered(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of tokens of the draft that the engine received last, int64 [B]."""
        self._end_batch()
        return self._table[OFFERED, rows]

    def are_registered(self, rows: np.ndarray) -> np.ndarray:
        """Return whether each sequence is registered, bool [B]."""
        registered: np.ndarray = self._table[IS_REGISTERED, rows] != 0
        return registered

    def forward(self, batch: KnownBatch, progress: Progress) -> None:
        """Record progress that is sent now; the sequences must all be current."""
        self._history.append(batch.rows, progress.tokens, progress.offsets)

    def commit(self, rows: np.ndarray, progress: Progress) -> None:
        """Record committed tokens and verified counts, to be sent later."""
        self._end_batch()
        offsets = progress.offsets.astype(np.int64)
        counts = offsets[1:] - offsets[:-1]
        table = self._table[:, rows]
        table[VERIFIED] += progress.verified * table[IS_COUNTED]
        table[STEPS] += (counts > 0) * (1 if progress.steps is None else np.maximum(progress.steps, 1))
        table[UNSENT] += counts
        table[IS_CURRENT] = 0
        self._table[:, rows] = table
        self._history.append(rows, progress.tokens, offsets)

    def take_unsent(self, rows: np.ndarray, indices: np.ndarray, progress: Progress) -> Progress:
        """Return the unsent progress of registered sequences, by wire id, and record it as sent.

        indices: int64 [B], of these sequences in `progress`, the engine's last.
        """
        self._end_batch()
        unsent, _, verified, steps, wire_ids, *_ = self._table[:, rows]
        offsets = offsets_of(unsent)
        tokens = self._history.last(rows, offsets.astype(np.int64))
        for line in (UNSENT, VERIFIED, STEPS):
            self._table[line, rows] = 0
        for line in (IS_COUNTED, IS_CURRENT):
            self._table[line, rows] = 1
        others = len(progress.sequence_ids) - len(rows)
        return replace(
            progress,
            sequence_ids=wire_ids,
            tokens=tokens,
            offsets=offsets,
            verified=verified,
            max_draft=progress.max_draft[indices],
            steps=steps,
            other_sequences=progress.other_sequences + others,
        )

    def register(self, row: int, wire_id: int) -> np.ndarray:
        """Record that a whole sequence is sent; return all its committed tokens, uint32."""
        self._end_batch()
        self._table[WIRE_ID, row] = wire_id
        for line in (UNSENT, VERIFIED, STEPS):
            self._table[line, row] = 0
        self._table[IS_REGISTERED, row] = 1
        # A draft that the engine still has belongs to an earlier registration.
        self._table[[IS_COUNTED, IS_CURRENT], row] = self._table[OFFERED, row] == 0
        return self._history.tokens(row)

    def set_offered(self, rows: np.ndarray, sizes: np.ndarray) -> None:
        """Record the number of draft tokens that the engine receives for each sequence, uint32 [B]."""
        if self._last is not None and self._last.rows is rows:
            self._last.offered = sizes
        else:
            self._table[OFFERED, rows] = sizes
        self._history.fold_if_due()

    def unregister(self, wire_ids: Collection[int]) -> int:
        """Record that the service has lost these sequences; return the number of running ones among them."""
        registered = self._registered_rows()
        lost = registered[np.isin(self._table[WIRE_ID, registered], list(wire_ids))]
        self._unregister_rows(lost)
        return len(lost)

    def unregister_all(self) -> int:
        """Record that the service has lost all sequences; return the number that it had."""
        registered = self._registered_rows()
        self._unregister_rows(registered)
        return len(registered)

    def withhold(self, request_id: str) -> None:
        """Prevent learning from running sequences of this name."""
        for row in self.row_of.values():
            info = self.info(row)
            if info.request_id == request_id:
                self._infos[row] = replace(info, learn=False)

    def _end_batch(self) -> None:
        """Forget the last batch, before anything else about sequences is read or changed."""
        if self._last is not None:
            # Not in `set_offered`, where the engine waits.
            self._table[OFFERED, self._last.rows] = self._last.offered
            self._last = None

    def _refuse(self, progress: Progress) -> NoReturn:
        """Raise the ValueError for an invalid batch."""
        offered = dict(zip(self.row_of, self.offered(self._rows()).tolist(), strict=True))
        progress.check(offered)
        raise AssertionError("the batch is valid")

    def _rows(self) -> np.ndarray:
        return np.array(list(self.row_of.values()), np.int64)

    def _registered_rows(self) -> np.ndarray:
        rows = self._rows()
        return rows[self.are_registered(rows)]

    def _unregister_rows(self, rows: np.ndarray) -> None:
        self._end_batch()
        for line in (IS_REGISTERED, IS_COUNTED, IS_CURRENT, VERIFIED):
            self._table[line, rows] = 0
        self.has_unregistered = self.has_unregistered or len(rows) > 0

    def _grow(self, rows: int) -> None:
        before = len(self._infos)
        self._table = np.pad(self._table, ((0, 0), (0, rows - before)))
        self._history.grow(rows)
        self._infos += [None] * (rows - before)
        self._free += range(rows - 1, before - 1, -1)
