"""Attention over a drafter's own layers in the target's KV pages."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Attention
from engine.executor.batch import Batch, Span
from engine.executor.transfer import on_device
from engine.models.decoder import Attend
from engine.models.ops import PLAIN, Ops
from engine.speculation.draft_tree import DraftTree


class DraftSpan(NamedTuple):
    """Consecutive tokens of one sequence that a drafter runs."""

    pages: list[int]
    """The sequence's page table."""
    start: int
    """Position of the first token; all slots before it are filled."""
    length: int
    tree: DraftTree | None = None
    """Shape of the last tokens, if they are a draft with branches."""


class DraftRows(NamedTuple):
    """Inputs of the drafter's layers for the N tokens of a batch of spans, in order."""

    positions: Tensor
    """int64 [N], for rope; tokens of a draft tree at the same depth have the same position."""
    attend: Attend
    """Stores the keys and values of a layer and computes attention; layers are numbered from the target's first
    layer."""


class DraftForward:
    """Runs attention of a drafter's layers over the target's pages."""

    def __init__(self, attention: Attention, page_size: int, device: torch.device, ops: Ops = PLAIN) -> None:
        self.ops = ops
        self.device = device
        self.page_size = page_size
        self._attention = attention

    def begin(self, spans: SequenceOf[DraftSpan]) -> DraftRows:
        """Prepare a batch of spans. Each row attends to itself and to all earlier slots of its sequence."""
        lengths = np.array([span.length for span in spans])
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        places = np.concatenate([np.arange(span.start, span.start + span.length) for span in spans])
        slots = np.concatenate([_slots(span, self.page_size) for span in spans])
        positions = places.copy()
        for first, span in zip(starts.tolist(), spans, strict=True):
            if span.tree is not None:
                end = first + span.length
                branches = slice(end - len(span.tree.parents), end)
                positions[branches] = places[branches.start] - 1 + span.tree.depths
        nothing = np.empty(0, np.int64)
        batch = Batch(
            tokens=np.zeros(len(places), np.int64),
            positions=positions,
            slots=slots,
            spans=[
                Span(first, span.length, span.start, span.pages, span.tree)
                for first, span in zip(starts.tolist(), spans, strict=True)
            ],
            logit_rows=nothing,
            logit_offsets=nothing,
            scored_offsets=nothing,
        )
        return DraftRows(on_device(positions, self.device), self._attention.begin(batch))


def _slots(span: DraftSpan, page_size: int) -> np.ndarray:
    places = np.arange(span.start, span.start + span.length)
    return np.array(span.pages, np.int64)[places // page_size] * page_size + places % page_size
