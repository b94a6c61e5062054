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

    def install(self, slots: SequenceOf[int], sequences: SequenceOf[Sequence], *, texts: bool) -> None:
        """Copy the state of sequences to slots; all tokens of a sequence but the last one are in the cache.

        Their pages are copied by `add_pages`. texts: whether the history is to have their committed tokens.
        """
        device = self.history.device
        samplings = [each.request.sampling for each in sequences]
        at = on_device(np.array(slots, np.int64), device)
        counts = np.array([(len(each), each.max_length, each.tokens[-1]) for each in sequences], np.int64)
        reals = np.array([(each.temperature, each.top_p, each.min_p) for each in samplings], np.float64)
        whole = np.array([(each.seed, each.top_k) for each in samplings], np.int64)
        for columns, values in (
            ((self.lengths, self.limits, self.last_tokens), on_device(counts.astype(np.int32), device)),
            ((self.temperatures, self.top_p, self.min_p), on_device(reals, device)),
            ((self.seeds, self.top_k), on_device(whole, device)),
        ):
            for index, column in enumerate(columns):
                column[at] = values[:, index]
        self.page_tables[at] = self.scratch_page
        firsts = np.zeros(len(sequences), np.int64) if texts else counts[:, 0]
        parts = [_history(each, first) for each, first in zip(sequences, firsts.tolist(), strict=True)]
        sizes = np.array([len(part) for part in parts])
        rows = on_device(np.repeat(np.array(slots, np.int64), sizes), device)
        places = np.arange(sizes.sum()) + np.repeat(firsts - np.cumsum(sizes) + sizes, sizes)
        self.history[rows, on_device(places, device)] = on_device(np.concatenate(parts), device)

    def add_pages(self, added: np.ndarray) -> None:
        """Write pages into page tables. added: int32 [3, N], slot, place and page of each."""
        slots, places, pages = on_device(added, self.page_tables.device)
        self.page_tables[slots.long(), places.long()] = pages


def _history(sequence: Sequence, first: int) -> np.ndarray:
    """Return a sequence's row of `DeviceState.history` from position `first` on, int32 [max_length - first]."""
    known = np.concatenate((sequence.tokens[first:], sequence.recorded_rest))
    row = np.full(sequence.max_length - first, NOT_RECORDED, np.int32)
    row[: len(known)] = known
    return row
