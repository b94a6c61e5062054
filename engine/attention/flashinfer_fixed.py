"""Attention of a fixed shape by FlashInfer's FA2 kernel, planned with upper bounds of lengths.

A plan copies page tables and bounds into buffers that a CUDA graph may hold. In the graph the true lengths, which the
device alone knows, take the place of the bounds: FA2 reads them there, and leaves out what was planned beyond them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.attention.cache import PagedCache
from engine.attention.calls import Shape, plan_paged
from engine.attention.fixed import FixedAttention, RaggedRows, StepShape
from engine.attention.layout import Piece
from engine.models.decoder import Attend


class FlashInferFixed(FixedAttention):
    """A wrapper of one sequence more than the step has: the rows behind all are those of nobody, on nobody's page."""

    def __init__(self, library: Any, shape: Shape, workspace: Tensor, cache: PagedCache, step: StepShape) -> None:
        """The cache has a page of nobody behind all others."""
        self._shape = shape
        self._cache = cache
        self._append = Append(library, cache)
        self._rows = step.rows
        sequences = step.sequences + 1
        # Padding may lie behind the last page of each sequence.
        most_pages = step.sequences * (step.pages + self._pages(step.width)) + self._pages(step.rows)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": shape.device}
        self._starts = torch.zeros(sequences + 1, **integers)
        self._last = torch.ones(sequences, **integers)
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(sequences + 1, **integers),
            paged_kv_indptr_buf=self._starts,
            paged_kv_indices_buf=torch.zeros(most_pages, **integers),
            paged_kv_last_page_len_buf=self._last,
            backend="fa2",
        )
        self._planned: torch.cuda.Event | None = None

    def plan(self, tables: Sequence[list[int]], contexts: Sequence[int], rows: Sequence[int]) -> None:
        """See `FixedAttention.plan`."""
        if self._planned is not None:
            # What is still to be copied stands in pinned memory that the next plan overwrites.
            self._planned.synchronize()
        starts = np.cumsum([0, *rows]).tolist()
        pieces = [
            Piece(start, count, context, self._whole(table, context + count))
            for start, count, context, table in zip(starts, rows, contexts, tables, strict=False)
        ]
        left = self._rows - starts[-1]
        pieces.append(Piece(starts[-1], left, 0, self._whole([], left)))
        plan_paged(self._wrapper, self._shape, pieces, [piece.keys for piece in pieces], causal=True)
        if torch.device(self._shape.device).type == "cuda":
            self._planned = torch.cuda.Event()
            self._planned.record()

    def begin(self, rows: RaggedRows) -> Attend:
        """See `FixedAttention.begin`."""
        # Causal masks end with the last token, so padding counts as if it were in the cache.
        counts = pad(rows.starts, (0, 1), value=self._rows).diff()
        planned = (self._starts.diff() - 1) * self._shape.page_size
        self._last.copy_(pad(rows.contexts, (0, 1)) + counts - planned)
        slots = rows.slots.int()

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self._cache.layers[layer]
            self._append(cache, key, value, slots)
            attended: Tensor = self._wrapper.run(query, cache)
            return attended

        return attend

    def _whole(self, table: list[int], keys: int) -> list[int]:
        """A page table with nobody's page where it has none for so many keys."""
        pages = max(1, self._pages(keys))
        return [*table[:pages], *[self._cache.pages - 1] * (pages - len(table))]

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._shape.page_size)


class Append:
    """Stores new keys and values. To the kernel the whole cache is one long sequence in which a slot is a position."""

    def __init__(self, library: Any, cache: PagedCache) -> None:
        self._library = library
        integers: dict[str, Any] = {"dtype": torch.int32, "device": cache.layers.device}
        self._pages = torch.arange(cache.pages, **integers)
        self._indptr = torch.tensor([0, cache.pages], **integers)
        self._last = torch.tensor([cache.page_size], **integers)

    def __call__(self, cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """cache: a layer's. key, value [N, kv_heads, d]. slots: int32 [N]."""
        self._library.append_paged_kv_cache(
            key.to(cache.dtype),
            value.to(cache.dtype),
            torch.zeros_like(slots),
            slots,
            cache,
            self._pages,
            self._indptr,
            self._last,
        )
