"""What the device knows of the running sequences, each in a seat of its own, so that no step asks the host for it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.executor.transfer import on_device
from engine.scheduling.sequence import Sequence

NOT_RECORDED = -1
"""No token."""


@dataclass(frozen=True, eq=False)
class DeviceState:
    """Tensors of S seats and an idle one behind them, which fills up batches. They are changed in place alone, so that
    a CUDA graph may hold their addresses.
    """

    lengths: Tensor
    """int32 [S + 1]: committed tokens."""
    computed: Tensor
    """int32 [S + 1]: leading tokens whose keys and values are in the cache."""
    limits: Tensor
    """int32 [S + 1]: the length that ends a sequence; 0 for a seat that nobody has."""
    last_tokens: Tensor
    """int32 [S + 1]: the last committed ones."""
    history: Tensor
    """int32 [S + 1, max_length]: the committed tokens; behind them what is still to come of a recorded output, and
    `NOT_RECORDED` where the logits decide. The idle seat's is anything."""
    page_tables: Tensor
    """int32 [S + 1, max_pages]; the scratch page where there is none."""
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
    """A page that is nobody's: keys and values of padding go there."""

    @classmethod
    def empty(cls, seats: int, max_length: int, max_pages: int, scratch_page: int, device: torch.device) -> DeviceState:
        """Seats that nobody has."""

        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(seats + 1, *shape, dtype=dtype, device=device)

        return cls(
            lengths=column(torch.int32),
            computed=column(torch.int32),
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
        """The seat of no sequence."""
        return len(self.lengths) - 1

    def sit(self, seat: int, sequence: Sequence) -> None:
        """Give a seat to a sequence, as it stands on the host."""
        sampling = sequence.request.sampling
        self.lengths[seat] = len(sequence)
        self.computed[seat] = sequence.computed
        self.limits[seat] = sequence.max_length
        self.last_tokens[seat] = int(sequence.tokens[-1])
        known = np.concatenate((sequence.tokens, sequence.recorded_rest)).astype(np.int32)
        self.history[seat] = NOT_RECORDED
        self.history[seat, : len(known)] = on_device(known, self.history.device)
        self.page_tables[seat] = self.scratch_page
        self.add_pages([seat], [0], [sequence.pages])
        self.seeds[seat] = sampling.seed
        self.temperatures[seat] = sampling.temperature
        self.top_k[seat] = sampling.top_k
        self.top_p[seat] = sampling.top_p
        self.min_p[seat] = sampling.min_p

    def rise(self, seat: int) -> None:
        """Take a seat back; a step that still names it does nothing for it."""
        self.limits[seat] = 0

    def add_pages(self, seats: SequenceOf[int], held: SequenceOf[int], pages: SequenceOf[SequenceOf[int]]) -> None:
        """Append pages to the tables of some seats, which held so many before."""
        counts = np.array([len(own) for own in pages])
        if not counts.any():
            return
        firsts = np.repeat(np.cumsum(counts) - counts - np.array(held), counts)
        flat = np.array([page for own in pages for page in own], np.int32)
        device = self.page_tables.device
        rows = on_device(np.repeat(np.array(seats, np.int64), counts), device)
        self.page_tables[rows, on_device(np.arange(len(flat)) - firsts, device)] = on_device(flat, device)
