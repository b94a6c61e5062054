"""Interface of attention backends: a backend owns the KV cache and computes attention over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.executor.batch import Batch
from engine.models.layers import Attend


class StepShape(NamedTuple):
    """Sizes that all steps of one shape share."""

    sequences: int
    """B, number of sequences, including padding."""
    rows: int
    """N, number of rows of all sequences, including padding. If it equals `sequences`, each has at most one row."""
    width: int
    """Largest number of rows of one sequence."""
    pages: int
    """P, length of a page table."""


class RaggedRows(NamedTuple):
    """The rows of a step, on the device. Padding rows follow the tokens of each sequence and the last sequence."""

    slots: Tensor
    """int64 [N]: cache slot of each row's keys and values; for padding, slots of a page that no sequence owns."""
    starts: Tensor
    """int32 [B + 1]: first row of each sequence, and the end of the last one."""
    contexts: Tensor
    """int32 [B]: number of tokens whose keys and values are in the cache before the step."""
    page_tables: Tensor
    """int32 [B, P]."""


class Attention(ABC):
    """Attention over paged keys and values."""

    runs_tree_parts = False
    """Whether a span may begin within a draft tree whose earlier nodes are in the cache."""

    @abstractmethod
    def begin(self, batch: Batch) -> Attend:
        """Return the attention of one step: a callable that stores a layer's new keys and values, then attends.

        Each token attends to its sequence's tokens up to itself; in a draft tree, to the committed tokens, its
        ancestors and itself. Entries after a sequence's `computed` tokens, from rejected drafts of earlier steps, are
        overwritten and never read.
        """

    @abstractmethod
    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy keys and values of all layers between slots, int64 [n] each; all are read before any is written."""

    @abstractmethod
    def fixed(self, step: StepShape) -> FixedAttention:
        """Return attention over the same cache for steps of one shape. No sequence may own the cache's last page."""


class FixedAttention(ABC):
    """Attention for steps of one shape in CUDA graphs; the lengths are known only on the device.

    Drafts are paths: each token attends to its sequence's tokens up to itself. The output of padding rows is finite.
    """

    @abstractmethod
    def plan(self, contexts: np.ndarray, rows: np.ndarray) -> None:
        """Prepare a step of B sequences, outside of the graph.

        contexts: int64 [B], upper bound of the number of cached tokens of each sequence. rows: int [B], number of rows
        of each sequence.
        """

    @abstractmethod
    def begin(self, rows: RaggedRows) -> Attend:
        """Return the attention of one step, like `Attention.begin`, without reading tensor values on the host."""
