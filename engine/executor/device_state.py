"""State of running sequences on the device, one request slot each, so that steps do not depend on the host.

The shapes of the tensors of a step do not depend on the lengths of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.executor.transfer import on_device
from engine.scheduling.sequence import Sequence

ALIGNED = 16
NOT_RECORDED = -1
"""Marks a position of `DeviceState.history` without a recorded token."""


class DeviceState:
    """Tensors of S request slots, plus an idle slot that pads batches.

    They are only changed in place, because CUDA graphs hold their addresses.
    """

    def __init__(self, slots: int, max_length: int, max_pages: int, scratch_page: int, device: torch.device) -> None:
        """Create a state with all slots free."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # A multiple, so that each row begins at an address that kernels read fast.
        size = -(-(slots + 1) // ALIGNED) * ALIGNED
        self._integers, self._longs = zeros(torch.int32, 3, size), zeros(torch.int64, 2, size)
        self._reals = zeros(torch.float64, 3, size)
        self.lengths, self.limits, self.last_tokens = self._integers[:, : slots + 1]
        """int32 [S + 1] each: number of committed tokens, of which the keys and values of all but the last one are in
        the cache; largest length of each sequence, 0 for a free slot; the last committed token."""
        self.seeds, self.top_k = self._longs[:, : slots + 1]
        """int64 [S + 1] each."""
        self.temperatures, self.top_p, self.min_p = self._reals[:, : slots + 1]
        """float64 [S + 1] each."""
        self.top_p.fill_(1)
        self.history = zeros(torch.int32, slots + 1, max_length)
        """int32 [S + 1, max_length]: committed tokens, then the rest of a recorded output, then `NOT_RECORDED`. The
        content of the idle slot is arbitrary."""
        self.page_tables = zeros(torch.int32, slots + 1, max_pages).fill_(scratch_page)
        """int32 [S + 1, max_pages]; unused entries have the scratch page."""
        self.scratch_page = scratch_page
        """A page that no sequence owns, for keys and values of padding."""

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
        integers = [(len(each), each.max_length, each.tokens[-1]) for each in sequences]
        longs = [(each.seed, each.top_k) for each in samplings]
        reals = np.array([(each.temperature, each.top_p, each.min_p) for each in samplings], np.float64)
        columns = (np.array(slots)[:, None], integers, longs, reals.view(np.int64))
        # One copy, whose rows are contiguous on the device.
        values = on_device(np.concatenate(columns, axis=1, dtype=np.int64).T.copy(), device)
        at = values[0]
        self._integers.index_copy_(1, at, values[1:4].int())
        self._longs.index_copy_(1, at, values[4:6])
        self._reals.index_copy_(1, at, values[6:].view(torch.float64))
        self.page_tables.index_fill_(0, at, self.scratch_page)
        firsts = [0 if texts else length for length, _, _ in integers]
        parts = [_history(each, first) for each, first in zip(sequences, firsts, strict=True)]
        stride = self.history.shape[1]
        places = [np.arange(len(part)) + slot * stride + first
                  for part, slot, first in zip(parts, slots, firsts, strict=True)]  # fmt: skip
        at, tokens = (on_device(np.concatenate(each), device) for each in (places, parts))
        self.history.view(-1).index_copy_(0, at, tokens)

    def add_pages(self, added: np.ndarray) -> None:
        """Write pages into page tables. added: int64 [2, N], place in the flattened tables and page of each."""
        places, pages = on_device(added, self.page_tables.device)
        self.page_tables.view(-1).index_copy_(0, places, pages.int())


def _history(sequence: Sequence, first: int) -> np.ndarray:
    """Return a sequence's row of `DeviceState.history` from position `first` on, int32 [max_length - first]."""
    known = np.concatenate((sequence.tokens[first:], sequence.recorded_rest))
    row = np.full(sequence.max_length - first, NOT_RECORDED, np.int32)
    row[: len(known)] = known
    return row


class PaddedDrafts(NamedTuple):
    """Draft paths of B sequences, padded to K tokens each."""

    tokens: Tensor
    """int32 [B, K]."""
    lengths: Tensor
    """int32 [B]: number of draft tokens; `build_inputs` drops tokens beyond the sequence's limit."""


class StepInputs(NamedTuple):
    """N rows, divided among B sequences in their order. A sequence's rows are its last committed token, its draft, and
    padding; more padding follows the last sequence. Padding is token 0 at position 0, whose keys and values are stored
    in the scratch page.
    """

    tokens: Tensor
    """int64 [N]."""
    positions: Tensor
    """int64 [N]: position of each token in its text."""
    cache_slots: Tensor
    """int64 [N]: page * page_size + offset."""
    request_slots: Tensor
    """int64 [N]: request slot of each row's sequence; the idle slot for rows after the last sequence."""
    starts: Tensor
    """int32 [B + 1]: first row of each sequence, and the end of the last one."""
    contexts: Tensor
    """int32 [B]: number of tokens whose keys and values are in the cache before the step."""
    counts: Tensor
    """int32 [B]: number of each sequence's rows that are not padding; 0 for a sequence that has ended."""


class Verified(NamedTuple):
    """Tokens that B sequences produced; W is the largest number of draft tokens + 1."""

    tokens: Tensor
    """int32 [B, W]: accepted draft tokens, then the target's own token, then zeros."""
    counts: Tensor
    """int32 [B]: accepted draft tokens + 1; 0 for a sequence that has ended."""
