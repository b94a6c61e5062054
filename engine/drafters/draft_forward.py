"""A drafter's access to the KV pages: attention over its own layers or the target's."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Attention, FixedAttention, StepShape
from engine.executor.batch import NO_PARENTS, Batch, offsets, place
from engine.executor.transfer import on_device
from engine.models.layers import PLAIN, Attend, Ops
from engine.scheduling.pages import PagePool
from engine.scheduling.plan import NO_ROWS
from engine.speculation.draft_tree import DraftTree


class DraftSpan(NamedTuple):
    """Consecutive tokens of one sequence that a drafter runs."""

    pages: list[int]
    """The sequence's page table."""
    start: int
    """Position of the first token; all slots before it are filled."""
    length: int
    tree: DraftTree | None = None
    """Shape of a draft tree whose last nodes are the span's last tokens. The span may begin within the tree, if
    `DraftForward.runs_tree_parts`."""


class DraftRows(NamedTuple):
    """Inputs of the drafter's layers for the N tokens of a batch of spans, in order."""

    positions: Tensor
    """int64 [N], for rope; tokens of a draft tree at the same depth have the same position."""
    attend: Attend
    """Stores the keys and values of a layer and computes attention; layers are numbered from 0."""


class DraftForward:
    """Prepares attention over pages for the tokens that a drafter runs."""

    def __init__(
        self,
        own: tuple[Attention, ...],
        target: Attention,
        pages: PagePool,
        device: torch.device,
        ops: Ops = PLAIN,
    ) -> None:
        """own: attention of each group of the drafter's layers. target: attention of the target's layers."""
        self.ops = ops
        self.device = device
        self.page_count = pages.count
        self.page_size = pages.page_size
        self._pages = pages
        self._own = own
        self.target = target

    @property
    def runs_tree_parts(self) -> bool:
        """Whether spans may begin within a draft tree."""
        return self.target.runs_tree_parts

    @property
    def own(self) -> Attention:
        """Attention of the drafter's layers."""
        assert len(self._own) == 1, "the drafter declared one group of layers"
        return self._own[0]

    def part(self, groups: slice) -> DraftForward:
        """Return access to some of the groups of layers, for one of several combined drafters."""
        return DraftForward(self._own[groups], self.target, self._pages, self.device, self.ops)

    def fixed(self, shape: StepShape) -> FixedAttention:
        """Return attention over the drafter's layers for steps of one shape, see `Attention.fixed`."""
        return self.own.fixed(shape)

    def begin(self, spans: SequenceOf[DraftSpan], *, on_target: bool = False) -> DraftRows:
        """Prepare a batch of spans on the drafter's layers, or on the target's, whose keys and values the target's next
        step overwrites. Each row attends to itself and to all earlier slots of its sequence, or in a tree to its
        ancestors.
        """
        attention = self.target if on_target else self.own
        lengths = np.array([span.length for span in spans])
        starts, computed = offsets(lengths), np.array([span.start for span in spans])
        pages = np.zeros((len(spans), int((computed + lengths - 1).max()) // self.page_size + 1), np.int32)
        for row, span in zip(pages, spans, strict=True):
            held = span.pages[: len(row)]
            row[: len(held)] = held
        trees = [NO_PARENTS if span.tree is None else span.tree.parents for span in spans]
        parents, nodes = np.concatenate(trees), offsets(np.array([len(tree) for tree in trees]))
        positions, slots = place(starts, computed, pages, parents, nodes, self.page_size)
        batch = Batch(NO_ROWS, positions, slots, starts, computed, pages, parents, nodes)
        return DraftRows(on_device(positions, self.device), attention.begin(batch))
