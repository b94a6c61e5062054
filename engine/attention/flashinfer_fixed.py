"""Attention of a fixed shape by FlashInfer's FA2 kernel, planned with upper bounds of lengths.

All that the host says in a plan is how many rows sequences have and how long their contexts may be, by which the work
is divided. True lengths and page tables, which the device has, take the place of those in a CUDA graph: FA2 reads them
there, and `chunks.py` corrects the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.attention.cache import PagedCache, as_stored
from engine.attention.calls import Shape
from engine.attention.chunks import Chunks
from engine.attention.fixed import FixedAttention, RaggedRows, StepShape
from engine.attention.layout import indptr, last_page_lengths
from engine.attention.planned import Planned
from engine.executor.transfer import staged
from engine.models.decoder import Attend

Store = Callable[[Tensor, Tensor, Tensor], None]
"""Stores new keys and values, [N, kv_heads, d] each, in a layer's cache, which comes first."""

SMALL_TILE = 16
"""Query heads of one tile, where there are few for each key head."""


class FlashInferFixed(FixedAttention):
    """One wrapper of R requests: the step's B sequences, one of the rows behind them, and others without rows."""

    def __init__(
        self,
        library: Any,
        shape: Shape,
        floats: Tensor,
        integers: Tensor,
        cache: PagedCache,
        step: StepShape,
    ) -> None:
        """floats: a workspace that others use too. integers: one of its own; for both see `chunks.workspaces`. The
        cache's last page is nobody's.
        """
        self._shape = shape
        self._step = step
        self._cache = cache
        self._append = Append(library, cache)
        self._device = torch.device(shape.device)
        self._requests = requests_of(step, shape.heads // shape.kv_heads)
        kind: dict[str, Any] = {"dtype": torch.int32, "device": shape.device}
        self._no_indices = torch.zeros(0, **kind)
        behind = self._pages(step.rows)
        self._nobodys = torch.full((behind,), cache.pages - 1, **kind)
        # Where each page table begins: those of the sequences are all of one size.
        firsts = torch.arange(step.sequences + 1, **kind) * step.pages
        others = self._requests - step.sequences
        self._first_pages = pad(firsts, (0, others), value=step.sequences * step.pages + behind)
        self._starts = torch.zeros(self._requests + 1, **kind)
        self._indices = torch.zeros(step.sequences * step.pages + behind, **kind)
        self._last = torch.ones(self._requests, **kind)
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            floats,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(self._requests + 1, **kind),
            paged_kv_indptr_buf=self._starts,
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=self._last,
            backend="fa2",
        )
        # Its own takes 8 MiB of the device and 8 of pinned memory, for each shape.
        self._integers = integers
        self._wrapper.reset_workspace_buffer(floats, integers)
        self._planned = Planned(self._wrapper, shape.device)

    def plan(self, contexts: Sequence[int], rows: Sequence[int]) -> None:
        """See `FixedAttention.plan`."""
        shape, count = self._shape, len(rows)
        queries = np.zeros(self._requests, np.int64)
        queries[:count] = rows
        queries[count] = self._step.rows - queries.sum()
        lengths = queries.copy()
        lengths[:count] += contexts
        pages = np.maximum(1, -(-lengths // shape.page_size))
        self._planned.plan(
            staged(indptr(queries), self._device),
            staged(indptr(pages), self._device),
            self._no_indices,
            staged(last_page_lengths(lengths, pages, shape.page_size), self._device),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )

    def begin(self, rows: RaggedRows) -> Attend:
        """See `FixedAttention.begin`."""
        # Causal masks end with the last token, so padding counts as if it were in the cache.
        others = self._requests - self._step.sequences
        starts = pad(rows.starts, (0, others), value=self._step.rows)
        lengths = starts.diff() + pad(rows.contexts, (0, others))
        self._starts.copy_(self._first_pages)
        self._indices.copy_(torch.cat((rows.page_tables.flatten(), self._nobodys)))
        # Of the pages and the keys in the last one only the sum is read, so those may be less than none.
        self._last.copy_(lengths - (self._starts.diff() - 1) * self._shape.page_size)
        if self._step.rows > self._step.sequences:
            # Of a single row nothing moves, and a chunk without keys weighs nothing. All plans of a wrapper have the
            # same layout, which no public name tells.
            plan = [int(number) for number in self._wrapper._plan_info]
            Chunks(self._integers, plan, self._requests, self._step.rows).correct(lengths, starts)
        store = self._append.at(rows.slots.int())

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self._cache.layers[layer]
            store(cache, key, value)
            attended: Tensor = self._wrapper.run(query, cache, out=query.new_empty(query.shape))
            return attended

        return attend

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._shape.page_size)


def requests_of(step: StepShape, sharing: int) -> int:
    """Requests of a wrapper for steps of a shape; `sharing`: query heads to a key head.

    FlashInfer makes tiles for a request that has all rows but one of each other request. Where most sequences have few
    rows large tiles would be nearly empty, and computing on them take as long as reading the keys; requests without
    rows make that one smaller. A longer draft then takes several tiles, which read its keys once each.
    """
    least = step.sequences + 1
    if step.rows * sharing <= SMALL_TILE * step.sequences:
        return max(least, step.rows + 1 - SMALL_TILE // sharing)
    return least


class Append:
    """Stores new keys and values. To the kernel the whole cache is one long sequence in which a slot is a position."""

    def __init__(self, library: Any, cache: PagedCache) -> None:
        self._library = library
        integers: dict[str, Any] = {"dtype": torch.int32, "device": cache.layers.device}
        self._pages = torch.arange(cache.pages, **integers)
        self._indptr = torch.tensor([0, cache.pages], **integers)
        self._last = torch.tensor([cache.page_size], **integers)

    def at(self, slots: Tensor) -> Store:
        """For one step. slots: int32 [N]."""
        sequence = torch.zeros_like(slots)

        def store(cache: Tensor, key: Tensor, value: Tensor) -> None:
            self._library.append_paged_kv_cache(
                as_stored(key, cache.dtype),
                as_stored(value, cache.dtype),
                sequence,
                slots,
                cache,
                self._pages,
                self._indptr,
                self._last,
            )

        return store
