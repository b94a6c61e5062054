"""State of running sequences on the device, one request slot each, so that steps do not depend on the host."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.executor.transfer import on_device
from engine.scheduling.sequence import Sequence

NOT_RECORDED = -1
"""Marks a position of `DeviceState.history` without a recorded token."""


@dataclass(frozen=True, eq=False)
class DeviceState:
    """Tensors of S request slots, plus an idle slot that pads batches.

    They are only changed in place, because CUDA graphs hold their addresses.
    """

    lengths: Tensor
    """int32 [S + 1]: number of committed tokens; the keys and values of all but the last one are in the cache."""
    limits: Tensor
    """int32 [S + 1]: largest length of each sequence; 0 for a free slot."""
    last_tokens: Tensor
    """int32 [S + 1]: the last committed token."""
    history: Tensor
    """int32 [S + 1, max_length]: committed tokens, then the rest of a recorded output, then `NOT_RECORDED`. The content
    of the idle slot is arbitrary."""
    page_tables: Tensor
    """int32 [S + 1, max_pages]; unused entries have the scratch page."""
    seeds: Tensor
    """int64 [S + 1]."""
    temperatures: Tensor
    """float64 [S + 1]."""
    top_k: Tensor
    """int64 [S + 1]."""
    top_p: Tensor
    """float64 [S + 1]."""
    min_p: Tensor
    """float64 [S + 1]."""
    scratch_page: int
    """A page that no sequence owns, for keys and values of padding."""

    @classmethod
    def empty(cls, slots: int, max_length: int, max_pages: int, scratch_page: int, device: torch.device) -> DeviceState:
        """Return a state with all slots free."""

        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(slots + 1, *shape, dtype=dtype, device=device)

        return cls(
            lengths=column(torch.int32),
            limits=column(torch.int32),
            last_tokens=column(torch.int32),
            history=column(torch.int32, max_length),
            page_tables=column(torch.int32, max_pages).fill_(scratch_page),
            seeds=column(torch.int64),
            temperatures=column(torch.float64),
            top_k=column(torch.int64),
            top_p=column(torch.float64).fill_(1),
            min_p=column(torch.float64),
            scratch_page=scratch_page,
        )

    @property
    def idle(self) -> int:
        """Index of the idle slot."""
        return len(self.lengths) - 1

    def assign(self, slot: int, sequence: Sequence) -> None:
        """Copy a sequence's state from the host to a slot; all of its tokens but the last one are in the cache."""
        sampling = sequence.request.sampling
        self.lengths[slot] = len(sequence)
        self.limits[slot] = sequence.max_length
        self.last_tokens[slot] = int(sequence.tokens[-1])
        known = np.concatenate((sequence.tokens, sequence.recorded_rest)).astype(np.int32)
        self.history[slot] = NOT_RECORDED
        self.history[slot, : len(known)] = on_device(known, self.history.device)
        self.page_tables[slot] = self.scratch_page
        self.add_pages([slot], [0], [sequence.pages])
        self.seeds[slot] = sampling.seed
        self.temperatures[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p

    def release(self, slot: int) -> None:
        """Release a slot. Steps in flight that still refer to it write nothing for it."""
        self.limits[slot] = 0

    def add_pages(self, slots: SequenceOf[int], held: SequenceOf[int], pages: SequenceOf[np.ndarray]) -> None:
        """Append `pages` to the page tables of `slots`, which have `held` pages each."""
        counts = np.array([len(own) for own in pages])
        if not counts.any():
            return
        firsts = np.repeat(np.cumsum(counts) - counts - np.array(held), counts)
        flat = np.concatenate(pages, dtype=np.int32)
        device = self.page_tables.device
        rows = on_device(np.repeat(np.array(slots, np.int64), counts), device)
        self.page_tables[rows, on_device(np.arange(len(flat)) - firsts, device)] = on_device(flat, device)


class RequestSlots:
    """Assigns request slots to sequences and updates their page tables."""

    def __init__(self, state: DeviceState) -> None:
        """state: a state whose slots are all free."""
        self._state = state
        self._free = list(range(state.idle))
        self._assigned: dict[int, Assigned] = {}
        """Assigned slots by sequence id."""

    @property
    def assigned(self) -> list[Sequence]:
        """Sequences that have a slot."""
        return [each.sequence for each in self._assigned.values()]

    def of(self, sequence: Sequence) -> int:
        """Return the slot of a sequence; if it has none, assign one and copy the sequence's state to it."""
        assigned = self._assigned.get(sequence.sequence_id)
        if assigned is None:
            slot = self._free.pop()
            self._state.assign(slot, sequence)
            assigned = Assigned(sequence, slot, sequence.preemptions, len(sequence.pages))
            self._assigned[sequence.sequence_id] = assigned
        return assigned.slot

    def add_pages(self, sequences: SequenceOf[Sequence]) -> None:
        """Append pages that were allocated for sequences since the last call to their tables on the device."""
        grown = [
            assigned
            for sequence in sequences
            if len(sequence.pages) > (assigned := self._assigned[sequence.sequence_id]).pages
        ]
        new = [assigned.sequence.pages[assigned.pages :] for assigned in grown]
        self._state.add_pages([assigned.slot for assigned in grown], [assigned.pages for assigned in grown], new)
        for assigned in grown:
            assigned.pages = len(assigned.sequence.pages)

    def release_ended(self) -> None:
        """Release the slots of sequences that have ended or were preempted."""
        for sequence_id, assigned in list(self._assigned.items()):
            sequence = assigned.sequence
            if not sequence.is_running or sequence.preemptions != assigned.preemptions:
                self._release(sequence_id)

    def release_all(self) -> None:
        """Release all slots."""
        for sequence_id in list(self._assigned):
            self._release(sequence_id)

    def _release(self, sequence_id: int) -> None:
        slot = self._assigned.pop(sequence_id).slot
        self._state.release(slot)
        self._free.append(slot)


@dataclass(eq=False, slots=True)
class Assigned:
    """A sequence with a request slot."""

    sequence: Sequence
    slot: int
    preemptions: int
    """Number of preemptions of the sequence when the slot was assigned; a later one frees the pages in its table."""
    pages: int
    """Number of pages in its table on the device."""
