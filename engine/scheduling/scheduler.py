"""Choose the sequences of the next step, the number of tokens of each, and their pages."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence as SequenceOf
from math import ceil
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from engine.config import EngineConfig
from engine.scheduling.kernels import LACKING, PLANNED, allocate_draft_room, plan_decoding
from engine.scheduling.pages import PagePool
from engine.scheduling.plan import NO_ROWS, StepPlan
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import (
    ADMISSION,
    COMPUTED,
    KIND,
    LENGTH,
    NEEDS_HOST,
    NO_ROW,
    PAGES,
    REGISTERED,
    RequestTable,
)

BY_ARRIVAL = attrgetter("sequence_id")


class Chunk(NamedTuple):
    """Prompt tokens that a step runs."""

    sequence: Sequence
    scheduled: int
    """Number of tokens."""
    produces: bool
    """Whether they are the last ones of a request with an output."""


class Scheduler:
    """Serves sequences in the order of their arrival.

    Pages are allocated as sequences grow. When they run out, the newest sequence is preempted: its pages are freed, and
    it waits to be recomputed. The oldest sequence therefore always advances.
    """

    def __init__(self, config: EngineConfig, pages: PagePool, extra_rows: int = 0, draft_ahead: int = 0) -> None:
        """extra_rows: largest number of rows that the drafter adds to a sequence's part of a step. draft_ahead: number
        of slots after the computed tokens that a step writes for the next draft.
        """
        self.pages = pages
        self.table = RequestTable[Sequence](config.max_sequences, pages.count)
        self.waiting: deque[Sequence] = deque()
        """In the order of arrival; all are newer than the running ones."""
        self.running: list[Sequence] = []
        """In the order of arrival."""
        self._admitted: list[Sequence] = []
        """Sequences that were admitted since the last call of `take_admitted`."""
        self._rows: np.ndarray | None = None
        """int64 [running]: their rows in the table; None after a change of `running`."""
        self.preemptions = 0
        self.is_draining = False
        """Whether sequences that have not begun stay waiting."""
        self._config = config
        self._extra_rows = extra_rows
        self._draft_ahead = draft_ahead
        # The slot of the last committed token; without the others, only the draft is worse.
        self._needed_ahead = min(draft_ahead, 1)
        self._watermark = ceil(config.watermark * pages.count)

    @property
    def has_work(self) -> bool:
        """Whether there are waiting or running sequences."""
        return bool(self.waiting or self.running)

    @property
    def begun(self) -> list[Sequence]:
        """Sequences that run, or wait to be computed again after a preemption."""
        return [*self.running, *(sequence for sequence in self.waiting if sequence.preemptions)]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; those that arrived later stay behind it."""
        insort(self.waiting, sequence, key=BY_ARRIVAL)

    def find(self, sequence_id: int) -> Sequence | None:
        """Return the waiting or running sequence with this id."""
        for sequences in (self.running, self.waiting):
            for sequence in sequences:
                if sequence.sequence_id == sequence_id:
                    return sequence
        return None

    def plan(self) -> StepPlan:
        """Admit waiting sequences and plan the next step, with pages allocated for all its tokens and draft room.

        Every running sequence whose prompt is computed gets one token and a draft; the remaining tokens of the step are
        given to prompts in the order of arrival. A sequence is skipped if another one computes its next page in this
        step, or if steps in flight may produce all of its remaining tokens.
        """
        self._admit()
        decoding, prompts = self._plan_decoding()
        chunks = self._plan_prompts(self.table.of(prompts), len(decoding))
        if len(prompts):  # They may have preempted newer sequences.
            decoding = decoding[self.table.state[decoding, ADMISSION] != 0]
        plan = self._plan_of(decoding, chunks)
        self._allocate_draft_room(plan)
        if self._extra_rows:
            plan.extra_rooms = self._allocate_extra_room(plan)
        return plan

    def _plan_of(self, decoding: np.ndarray, chunks: list[Chunk]) -> StepPlan:
        """Return the plan of sequences that run their last token, rows int64 [D], and of prompts."""
        if not chunks:
            return StepPlan(self.table, decoding, NO_ROWS, len(decoding))
        chunks = sorted(chunks, key=lambda chunk: not chunk.produces)
        rows = np.append(decoding, [chunk.sequence.row for chunk in chunks])
        sizes = np.array([chunk.scheduled for chunk in chunks], np.int64)
        return StepPlan(self.table, rows, sizes, len(decoding) + sum(chunk.produces for chunk in chunks))

    def _plan_decoding(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that decode, with a page for the next token, and those with prompts to run, int64 each."""
        while True:
            rows = self._running_rows()
            decoding, others = np.empty((2, len(rows)), np.int64)
            count, rest = plan_decoding(
                self.table.state, self.table.pages, self.pages.arrays, rows, self.pages.page_size,
                self._needed_ahead, decoding, others,
            )  # fmt: skip
            if count != LACKING:
                return decoding[:count], others[:rest]
            self._preempt(self.running[-1])

    def _plan_prompts(self, sequences: SequenceOf[Sequence], decoding: int) -> list[Chunk]:
        """Plan prompt chunks beside the tokens of `decoding` sequences."""
        left = self._config.max_step_tokens - decoding * (1 + self._config.max_draft)
        chunks: list[Chunk] = []
        planned_pages: set[bytes] = set()
        for sequence in sequences:
            if not sequence.is_running:
                continue
            self._reuse(sequence)
            if self._is_planned(sequence, planned_pages):
                continue
            # The last chunk of a prompt may be followed by a draft.
            scheduled = self._chunk(sequence, left - self._config.max_draft)
            if scheduled <= 0 or not self._grow(sequence, scheduled):
                continue
            left -= scheduled + self._config.max_draft
            planned_pages.update(map(bytes, self._hashes_after(sequence, scheduled)))
            produces = sequence.request.sampling.max_tokens > 0 and sequence.computed + scheduled == len(sequence)
            chunks.append(Chunk(sequence, scheduled, produces))
        return [chunk for chunk in chunks if chunk.sequence.is_running]

    def take_admitted(self) -> list[Sequence]:
        """Return the running sequences that were admitted since the last call, also after a preemption."""
        admitted = [sequence for sequence in self._admitted if sequence.is_running]
        self._admitted = []
        return admitted

    def register_pages(self, sequence: Sequence) -> None:
        """Register a sequence's full pages with the prefix cache; their tokens must be committed."""
        before, full = int(sequence.state[REGISTERED]), sequence.computed // self.pages.page_size
        if full > before:
            self.pages.register(sequence.held_pages[before:full], self._hashes(sequence, full)[before:])
            sequence.state[REGISTERED] = full

    def register_rows(self, rows: np.ndarray) -> None:
        """Do `register_pages` for sequences of the table that have filled a page."""
        state = self.table.state
        for row in rows[state[rows, COMPUTED] // self.pages.page_size > state[rows, REGISTERED]].tolist():
            if (sequence := self.table.sequences[row]) is not None:
                self.register_pages(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones; it keeps its pages and its row until `remove`."""
        self.running.remove(sequence)
        self._rows = None
        sequence.is_running = False
        sequence.state[ADMISSION] = 0

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, and free its pages and its row."""
        if sequence.is_running:
            self.stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.row != NO_ROW:
            self.pages.free(sequence.held_pages)
            self.table.remove(sequence)

    @property
    def needs_host(self) -> bool:
        """Whether a running sequence needs the host."""
        return bool((self.table.state[self._running_rows(), KIND] & NEEDS_HOST).any())

    @property
    def is_short(self) -> bool:
        """Whether the next step may lack pages or rows."""
        each = self.pages.pages_for(1 + self._config.max_draft + self._draft_ahead) + 1
        free = self.pages.free_count - self._watermark - each * len(self.running)
        if not self.waiting:
            return free < 0
        return not self.table.has_room or free < self.pages.pages_for(len(self.waiting[0]))

    def _running_rows(self) -> np.ndarray:
        """Return the rows of the running sequences, int64, in the order of their arrival."""
        if self._rows is None:
            self._rows = np.array([sequence.row for sequence in self.running], np.int64)
        return self._rows

    def _admit(self) -> None:
        """Move waiting sequences to the running ones while there is room for them."""
        if not self.waiting:
            return
        state = self.table.state[self._running_rows()]
        reserved = int(np.maximum(0, -(-state[:, LENGTH] // self.pages.page_size) - state[:, PAGES]).sum())
        while self.waiting and len(self.running) < self._config.max_sequences:
            sequence = self.waiting[0]
            if self.is_draining and not sequence.preemptions:
                break
            found = self._find_prefix(sequence)
            needed = reserved + self.pages.pages_for(len(sequence)) - self.pages.count_owned(found)
            if sequence.row == NO_ROW and not self.table.has_room:
                break
            # A sequence that fits only alone is admitted when nothing else runs.
            if self.running and needed + self._watermark > self.pages.free_count:
                break
            self._start(self.waiting.popleft(), found)
            reserved += self._missing_pages(sequence, len(sequence))

    def _start(self, sequence: Sequence, found: np.ndarray) -> None:
        """Let a sequence run, with pages of the prefix cache for its first tokens, int32."""
        self.running.append(sequence)
        self._rows = None
        sequence.is_running = True
        if sequence.row == NO_ROW:
            self.table.add(sequence)
        self.table.admit(sequence)
        self._admitted.append(sequence)
        self._take_over(sequence, found)

    def _missing_pages(self, sequence: Sequence, tokens: int) -> int:
        """Return the number of additional pages that a sequence needs for `tokens` tokens."""
        return max(0, self.pages.pages_for(tokens) - len(sequence.held_pages))

    def _hashes(self, sequence: Sequence, pages: int) -> np.ndarray:
        """Return the hashes of a sequence's first `pages` pages, uint64 [pages, WORDS]."""
        return sequence.page_hashes.of(sequence.tokens, pages, self.pages.page_size)

    def _reusable_pages(self, sequence: Sequence) -> int:
        """Return the number of leading pages that may be taken from the prefix cache.

        Tokens whose logits are needed must run: the last one, and all of a prompt with log-probabilities.
        """
        if sequence.request.sampling.prompt_logprobs is not None:
            return 0
        return (len(sequence) - 1) // self.pages.page_size

    def _find_prefix(self, sequence: Sequence) -> np.ndarray:
        """Return the pages of the prefix cache for the first tokens of a sequence without pages, int32."""
        return self.pages.find(self._hashes(sequence, self._reusable_pages(sequence)))

    def _reuse(self, sequence: Sequence) -> None:
        """Append pages of the prefix cache for the tokens after the computed ones."""
        size, before = self.pages.page_size, len(sequence.held_pages)
        reusable = self._reusable_pages(sequence)
        if sequence.computed != before * size or reusable <= before:
            return
        self._take_over(sequence, self.pages.find(self._hashes(sequence, reusable)[before:]))

    def _take_over(self, sequence: Sequence, found: np.ndarray) -> None:
        """Append pages of the prefix cache, int32, to the page table of a sequence, which has computed all before."""
        if len(found):
            self.pages.share(found)
            sequence.add_pages(found)
            sequence.reuse(len(found) * self.pages.page_size)
            sequence.state[REGISTERED] = sequence.state[PAGES]

    def _is_planned(self, sequence: Sequence, planned_pages: set[bytes]) -> bool:
        """Return whether another sequence computes the next page of this prompt in the same step."""
        index = len(sequence.held_pages)
        if not planned_pages or sequence.computed != index * self.pages.page_size:
            return False
        return index < self._reusable_pages(sequence) and (
            bytes(self._hashes(sequence, index + 1)[index]) in planned_pages
        )

    def _hashes_after(self, sequence: Sequence, scheduled: int) -> np.ndarray:
        """Return the hashes of the pages that the step fills, uint64 [n, WORDS]."""
        full = (sequence.computed + scheduled) // self.pages.page_size
        return self._hashes(sequence, full)[int(sequence.state[REGISTERED]) :]

    def _chunk(self, sequence: Sequence, limit: int) -> int:
        """Return the number of prompt tokens to run, at most `limit`: all of them, or up to the end of a page."""
        end = min(len(sequence), sequence.computed + limit)
        page_end = end - end % self.pages.page_size
        return (page_end if sequence.computed < page_end and end < len(sequence) else end) - sequence.computed

    def _grow(self, sequence: Sequence, scheduled: int) -> bool:
        """Allocate pages for the scheduled tokens; return False if the sequence itself was preempted."""
        end = min(sequence.end_after(scheduled) + self._needed_ahead, sequence.max_length)
        needed = self._missing_pages(sequence, end)
        while needed > self.pages.free_count:
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        sequence.add_pages(self.pages.allocate(needed))
        return True

    def _allocate_draft_room(self, plan: StepPlan) -> None:
        """Allocate free pages above the watermark for drafts, and set what the plan says of its sequences."""
        planned, others = np.empty((PLANNED, plan.producers), np.int64), plan.all_rows[plan.producers :]
        chunks = plan.chunks[: len(plan.chunks) - len(others)]
        plan.kinds, plan.lacking_pages = allocate_draft_room(
            self.table.state, self.table.pages, self.pages.arrays, plan.rows, chunks, self.pages.page_size,
            self._config.max_draft, self._watermark, self._needed_ahead, self._draft_ahead,
            planned,
        )  # fmt: skip
        plan.rooms, plan.admissions, plan.computed, plan.ends = planned
        if len(others):
            rest = self.table.state[others]
            plan.admissions = np.append(plan.admissions, rest[:, ADMISSION])
            plan.computed = np.append(plan.computed, rest[:, COMPUTED])

    def _allocate_extra_room(self, plan: StepPlan) -> np.ndarray:
        """Divide the step's remaining tokens among the sequences with draft room, if pages are free.

        Prompts and drafts come first. Extra rows are never committed, so they may lie beyond the maximum length.
        Returns `StepPlan.extra_rooms`.
        """
        drafting = np.flatnonzero(plan.rooms)
        left = self._config.max_step_tokens - plan.scheduled_tokens - int(plan.rooms.sum())
        wanted = min(self._extra_rows, left // max(1, len(drafting)))
        rooms = np.zeros(plan.producers, np.int64)
        for index in drafting.tolist():
            sequence = plan.producing[index]
            end = sequence.end_after(int(plan.scheduled[index])) + int(plan.rooms[index])
            rooms[index] = max(0, min(wanted, self._allocate_spare(sequence, end + wanted) - end))
        return rooms

    def _allocate_spare(self, sequence: Sequence, tokens: int) -> int:
        """Allocate pages above the watermark towards `tokens` tokens; return the number of tokens that fit."""
        spare = max(0, self.pages.free_count - self._watermark)
        sequence.add_pages(self.pages.allocate(min(self._missing_pages(sequence, tokens), spare)))
        return len(sequence.held_pages) * self.pages.page_size

    def _preempt(self, sequence: Sequence) -> None:
        self.stop(sequence)
        self.pages.free(sequence.held_pages)
        sequence.restart()
        self.add(sequence)
        self.preemptions += 1
