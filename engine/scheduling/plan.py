"""Input of a step of the engine, as arrays over its sequences. Nothing here outlives the step.

The scheduler makes a `StepPlan`: which sequences run, and how many committed tokens of each. Speculation adds drafts to
it, an executor runs it, and its results come back as an `engine.scheduling.result.StepResult`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from engine.drafters.drafts import Drafts
from engine.scheduling.table import ADMISSION, KIND, NEEDS_HOST, RequestTable
from engine.speculation.draft_tree import straight_lengths

if TYPE_CHECKING:
    from engine.scheduling.sequence import Sequence
    from ssd.budget.token_budget import StepPrice

NO_TOKENS = np.empty(0, np.uint32)
NO_ROWS = np.empty(0, np.int64)


@dataclass(eq=False)
class StepPlan:
    """The B sequences of a step. The first P of them produce tokens, and only these have drafts.

    Sequences that run their last committed token alone come first, then those that run the last tokens of their
    prompt, then those that run earlier tokens of it; each in the order of arrival.
    """

    table: RequestTable[Sequence]
    all_rows: np.ndarray
    """int64 [B]: rows of the sequences in the table."""
    chunks: np.ndarray
    """int64 [at most B]: numbers of committed tokens that the last sequences run; the others run one."""
    producers: int
    """P: number of sequences whose scheduled tokens include the last committed one, so that they yield tokens."""
    computed: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [B]: known number of leading tokens in the KV cache; steps in flight may add more."""
    admissions: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [B]: ADMISSION of the sequences when the step was planned: they may end before its results are read."""
    kinds: int = 0
    """All bits of KIND of the producing sequences, see `engine.scheduling.table`."""
    ends: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [P]: upper bound of the number of each producing sequence's tokens in the cache after the step, without its
    draft."""
    lacking_pages: int = 0
    """Number of pages that the page tables of the producing sequences on the device lack."""
    rooms: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [P]: largest number of draft tokens that the request, its maximum length and the pages allow."""
    extra_rooms: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [P]: largest number of extra rows that the size of the step and the pages allow; may be empty if the
    drafter has none."""
    drafts: Drafts = field(default_factory=lambda: Drafts.empty(0))
    """Drafts of the producing sequences. If the device drafts, they are known once the results are read."""
    lengths: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [P]: largest number of leading tokens of each draft that the step verifies."""
    constrained: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [n]: indices of producing sequences whose drafts were changed to follow a grammar."""
    proposed: Drafts = field(default_factory=lambda: Drafts.empty(0))
    """The drafter's own drafts for these."""
    price: StepPrice | None = None
    """What draft tokens and time are worth; None if durations of steps are not measured."""
    extra_rows: int = 0
    """Number of extra rows of all sequences."""
    drafts_on_device: bool = False
    """Whether the device makes the drafts, without calls of the drafter."""
    is_drafting: bool = False
    """Whether the drafter is called, or the device drafts, in this step."""
    is_backing_off: bool = False
    """Whether the drafter was not called because drafting was not worthwhile recently."""
    drafting_s: float = 0.0
    """Seconds by which drafting delayed the step."""
    began: float = 0.0
    """When its planning began, by `time.perf_counter`."""

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.all_rows)

    def take(self, indices: np.ndarray) -> StepPlan:
        """Return the plan for some of the producing sequences alone, int64 [n], without drafts."""
        return replace(
            self, all_rows=self.rows[indices], chunks=self.scheduled[indices], producers=len(indices),
            computed=self.computed[indices], admissions=self.admissions[indices], rooms=self.rooms[indices],
            extra_rooms=self.extra_rooms[indices] if len(self.extra_rooms) else NO_ROWS,
        )  # fmt: skip

    @cached_property
    def prompts(self) -> StepPlan:
        """The plan for the scheduled tokens of prompts, except the last token of producing sequences."""
        chunks = self.scheduled - (np.arange(len(self)) < self.producers)
        at = np.flatnonzero(chunks)
        return replace(
            self, all_rows=self.all_rows[at], chunks=chunks[at], producers=0, computed=self.computed[at],
            admissions=self.admissions[at], lengths=NO_ROWS, drafts=Drafts.empty(0),
        )  # fmt: skip

    def indices_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices of rows of producing sequences, int64 [n]; -1 for other rows."""
        places = np.full(len(self.table.state), -1)
        places[self.rows] = np.arange(self.producers)
        return places[rows]

    def has(self, kind: int) -> bool:
        """Return whether a producing sequence has a bit of KIND, see `engine.scheduling.table`."""
        return bool(self.kinds & kind)

    @property
    def needs_host(self) -> bool:
        """Whether a sequence of the step needs the host, see NEEDS_HOST."""
        others = self.all_rows[self.producers :]
        return self.has(NEEDS_HOST) or bool((self.table.state[others, KIND] & NEEDS_HOST).any())

    @cached_property
    def scheduled(self) -> np.ndarray:
        """int64 [B]: number of committed tokens that each sequence runs."""
        return np.append(np.ones(len(self) - len(self.chunks), np.int64), self.chunks)

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 [P]: rows of the producing sequences in the table."""
        return self.all_rows[: self.producers]

    @cached_property
    def producing(self) -> SequenceOf[Sequence]:
        """The producing sequences."""
        return self.table.of(self.rows)

    @property
    def still_runs(self) -> np.ndarray:
        """bool [B]: whether each sequence still runs."""
        return self.table.state[self.all_rows, ADMISSION] == self.admissions

    @property
    def is_running(self) -> bool:
        """Whether a sequence of the step still runs."""
        return bool(self.still_runs.any())

    @property
    def is_tree(self) -> np.ndarray:
        """bool [P]: whether the verified part of each draft has branches."""
        batch = self.drafts.batch
        return straight_lengths(batch.parents, batch.offsets) < self.lengths

    @property
    def scheduled_tokens(self) -> int:
        """Number of committed tokens that run."""
        return len(self) - len(self.chunks) + sum(self.chunks.tolist())

    @property
    def verified(self) -> int:
        """Largest number of draft tokens that the step verifies."""
        return int(self.lengths.sum())

    @property
    def tokens(self) -> int:
        """Largest number of tokens that run, drafts and extra rows included."""
        return self.scheduled_tokens + self.verified + self.extra_rows
