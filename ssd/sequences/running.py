"""The running sequences of a drafter by id, with their rows in the tables, and its sessions between two turns."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, KeysView
from dataclasses import dataclass

import numpy as np

from ssd.corpus.rollout import NO_TAG, Rollout
from ssd.sequences.local_index import LocalIndex
from ssd.sequences.tables import NODES, SIZE, Sequences

NO_ROWS = np.empty(0, np.int64)


@dataclass(eq=False)
class Running:
    """A running sequence, apart from its row in the tables."""

    first_learned: int
    """Index of the first token that is remembered when the sequence finishes; prompt tokens before it are not."""
    given: int
    """Number of tokens that it began with: the prompt, and what was committed elsewhere."""
    session_id: Hashable
    request_id: str | None
    turns: frozenset[str | None]
    """Request ids of this request and of the earlier turns of its session."""
    learn: bool
    """Whether its output may be drafted for other sequences; cleared when its request id is forgotten."""
    rollout: Rollout | None
    """The problem and policy that it samples; None if it is no rollout."""
    is_kept: bool = True
    """Whether the session's next turn may reuse its index."""
    row: int = -1
    """Row in the tables."""

    @property
    def tag(self) -> int:
        """Tag of its text, see `Rollout.tag`."""
        return NO_TAG if self.rollout is None else self.rollout.tag


class RunningById:
    """Running sequences by id, in the order of their starts."""

    def __init__(self, tables: Sequences) -> None:
        self._tables = tables
        self._records: dict[int, Running] = {}
        self._row_of: dict[int, int] = {}
        """Rows of the sequences. Reading them from `_records` would take three times as long for a batch."""
        self._last_ids: list[int] = []
        """Ids of the last batch: most steps have the same sequences as the step before."""
        self.last_rows = NO_ROWS
        """int64 [B]: rows of the last batch; none after a sequence was removed."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._records.values())

    @property
    def ids(self) -> KeysView[int]:
        """Ids of the sequences."""
        return self._records.keys()

    def get(self, sequence_id: int) -> Running | None:
        """Return a sequence; None if it is not running."""
        return self._records.get(sequence_id)

    def check_is_new(self, sequence_id: int) -> None:
        """Raise ValueError for a sequence that is running."""
        if sequence_id in self._records:
            raise ValueError(f"sequence {sequence_id} is already running")

    def add(self, sequence_id: int, running: Running) -> None:
        """Add a sequence that has its row in the tables."""
        self._records[sequence_id], self._row_of[sequence_id] = running, running.row

    def remove(self, sequence_id: int) -> Running:
        """Remove a sequence, and return it; its row remains in the tables."""
        del self._row_of[sequence_id]
        self._last_ids, self.last_rows = [], NO_ROWS
        return self._records.pop(sequence_id)

    def clear(self) -> None:
        """Remove all sequences."""
        self._records.clear()
        self._row_of.clear()
        self._last_ids, self.last_rows = [], NO_ROWS

    def rows_of(self, sequence_ids: list[int]) -> np.ndarray:
        """Return the rows of a batch, int64 [B].

        Raises ValueError for a sequence that is not running or that appears twice.
        """
        if sequence_ids == self._last_ids:
            return self.last_rows
        count = len(sequence_ids)
        try:
            rows = np.fromiter(map(self._row_of.__getitem__, sequence_ids), np.int64, count)
        except KeyError as missing:
            raise ValueError(f"sequence {missing.args[0]} was not started") from None
        if count > 1 and len({*sequence_ids}) != count:
            twice = next(one for one in sequence_ids if sequence_ids.count(one) > 1)
            raise ValueError(f"sequence {twice} appears twice in the batch")
        self._last_ids, self.last_rows = sequence_ids, rows
        return rows

    def size_of(self, sequence_id: int) -> int:
        """Return the number of tokens of a sequence, prompt included."""
        return int(self._tables.state[self._row_of[sequence_id], SIZE])

    def accepted(self, sequence_id: int, tokens: np.ndarray, verified: int) -> int:
        """Return how many of the committed `tokens`, uint32 [n], a sequence's last draft contained.

        verified: as in `Progress`. Returns 0 for a sequence that is not running.
        """
        row = self._row_of.get(sequence_id)
        return 0 if row is None else self._tables.accepted(row, tokens, verified)

    def offered(self) -> dict[int, int]:
        """Return the number of tokens in the last draft of each sequence, by sequence id."""
        nodes = self._tables.state[:, NODES]
        return {sequence_id: max(0, int(nodes[row]) - 1) for sequence_id, row in self._row_of.items()}

    def offered_to(self, sequence_ids: list[int]) -> np.ndarray:
        """Return the number of tokens in the last draft of each sequence, int64 [n]; -1 for one that is not running."""
        nodes = self._tables.state[:, NODES]
        at = np.array([self._row_of.get(sequence_id, -1) for sequence_id in sequence_ids], np.int64)
        return np.where(at < 0, -1, np.maximum(0, nodes[at] - 1))

    def record_use(self) -> None:
        """Record that the sequences of the last batch were used now."""
        self._tables.used[self.last_rows] = time.monotonic_ns()

    def last_uses(self) -> tuple[list[int], np.ndarray]:
        """Return the sequences, and when each was last used, int64 [n], in ns of a monotonic clock.

        A sequence was used when it began, and when `record_use` recorded a batch with it.
        """
        rows = np.fromiter(self._row_of.values(), np.int64, len(self._row_of))
        return list(self._row_of), self._tables.used[rows]


@dataclass(frozen=True, eq=False)
class Idle:
    """A session between two turns."""

    local: LocalIndex
    turns: frozenset[str | None]
    """Request ids of its turns."""
    since: float
    """Time at which its last turn ended, by the corpus's clock."""


class IdleSessions:
    """The idle sessions, the longest idle first."""

    def __init__(self, most_sessions: int, most_tokens: int) -> None:
        self._most_sessions, self._most_tokens = most_sessions, most_tokens
        self._sessions: OrderedDict[Hashable, Idle] = OrderedDict()
        self._tokens = 0
        """Tokens of all sessions."""

    def keep(self, session: Hashable, idle: Idle) -> None:
        """Keep a session after a turn, and drop the longest idle ones while there are too many sessions or tokens."""
        self.pop(session)
        idle.local.shrink()
        self._sessions[session] = idle
        self._tokens += idle.local.size
        while len(self._sessions) > self._most_sessions or self._tokens > self._most_tokens:
            self.pop(next(iter(self._sessions)))

    def pop(self, session: Hashable) -> Idle | None:
        """Remove a session for its next turn and return it; None if it is not kept."""
        idle = self._sessions.pop(session, None)
        if idle is not None:
            self._tokens -= idle.local.size
        return idle

    def drop(self, is_ended: Callable[[Idle], bool]) -> None:
        """Drop the sessions for which a condition holds."""
        for session in [session for session, idle in self._sessions.items() if is_ended(idle)]:
            self.pop(session)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(idle.local.nbytes for idle in self._sessions.values())
