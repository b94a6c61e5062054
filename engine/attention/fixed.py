"""Attention for steps of a fixed shape, whose lengths only the device knows: what a CUDA graph can hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.models.decoder import Attend


class StepShape(NamedTuple):
    """What does not change from one step of a shape to the next."""

    sequences: int
    """B."""
    rows: int
    """N, of all sequences together, padding among them. With as many as sequences, each of those has one at most."""
    width: int
    """Rows of one sequence at most."""
    pages: int
    """P, in a page table."""


class RaggedRows(NamedTuple):
    """Where the tokens of a step stand, on the device. Padding comes behind a sequence's tokens, and behind all."""

    slots: Tensor
    """int64 [N]: where keys and values go, those of padding to a page that is nobody's."""
    starts: Tensor
    """int32 [B + 1]: where each sequence's rows begin, and where the last one's end."""
    contexts: Tensor
    """int32 [B]: tokens before, whose keys and values are in the cache."""
    page_tables: Tensor
    """int32 [B, P]."""


class FixedAttention(ABC):
    """Paths alone: each token attends to its sequence's tokens up to itself. What padding attends to does not matter,
    but is finite.
    """

    @abstractmethod
    def plan(self, contexts: Sequence[int], rows: Sequence[int]) -> None:
        """What the host knows, before each step and outside of a graph: at most how long each context is, and how many
        rows each sequence has.
        """

    @abstractmethod
    def begin(self, rows: RaggedRows) -> Attend:
        """Attention for one step, by tensors whose values the host does not look at; as in `Attention.begin`."""
