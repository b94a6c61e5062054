"""Attention for steps of a fixed shape on FlashInfer's FA2 kernel, planned with upper bounds of the lengths.

The host plans with the number of rows of each sequence and upper bounds of the contexts.
In a CUDA graph the true lengths and page tables, which are on the device, replace those bounds: FA2 reads them there,
and `chunks.py` corrects the plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.attention.base import FixedAttention, RaggedRows, StepShape
from engine.attention.cache import PagedCache
from engine.attention.calls import CacheWriter, KernelConfig, PlannedWrapper
from engine.attention.chunks import Chunks
from engine.attention.layout import indptr, last_page_lengths
from engine.executor.transfer import staged
from engine.models.self_attention import Attend

SMALL_TILE = 16
"""Number of query heads in FA2's smallest tile."""


class FlashInferFixed(FixedAttention):
    """A FlashInfer wrapper with R requests: the step's B sequences, one request for padding rows, and empty ones."""

    def __init__(
        self,
        library: Any,
        config: KernelConfig,
        floats: Tensor,
        integers: Tensor,
        cache: PagedCache,
        step: StepShape,
    ) -> None:
        """floats: workspace shared with other calls. integers: workspace of this wrapper only; for sizes see
        `chunks.workspaces`.

        No sequence may own the cache's last page.
        """
        self._config = config
        self._step = step
        self._cache = cache
        self._writer = CacheWriter(library, cache)
        self._device = torch.device(config.device)
        self._requests = requests_of(step, config.heads // config.kv_heads)
        integers_there: dict[str, Any] = {"dtype": torch.int32, "device": config.device}
        self._no_indices = torch.zeros(0, **integers_there)
        after = self._pages(step.rows)
        self._unowned_pages = torch.full((after,), cache.pages - 1, **integers_there)
        # First index of each page table; the tables of the B sequences have equal lengths.
        firsts = torch.arange(step.sequences + 1, **integers_there) * step.pages
        others = self._requests - step.sequences
        self._first_pages = pad(firsts, (0, others), value=step.sequences * step.pages + after)
        self._starts = torch.zeros(self._requests + 1, **integers_there)
        self._indices = torch.zeros(step.sequences * step.pages + after, **integers_there)
        self._last = torch.ones(self._requests, **integers_there)
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            floats,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(self._requests + 1, **integers_there),
            paged_kv_indptr_buf=self._starts,
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=self._last,
            backend="fa2",
        )
        # The wrapper's default workspace would take 8 MiB on the device and 8 MiB of pinned memory for each shape.
        self._integers = integers
        self._wrapper.reset_workspace_buffer(floats, integers)
        self._planned = PlannedWrapper(self._wrapper, config.device)

    def plan(self, contexts: np.ndarray, rows: np.ndarray) -> None:
        """See `FixedAttention.plan`."""
        config, count = self._config, len(rows)
        queries = np.zeros(self._requests, np.int64)
        queries[:count] = rows
        queries[count] = self._step.rows - queries.sum()
        lengths = queries.copy()
        lengths[:count] += contexts
        pages = np.maximum(1, -(-lengths // config.page_size))
        self._planned.plan(
            staged(indptr(queries), self._device),
            staged(indptr(pages), self._device),
            self._no_indices,
            staged(last_page_lengths(lengths, pages, config.page_size), self._device),
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.page_size,
            causal=True,
            q_data_type=config.dtype,
            kv_data_type=config.dtype,
        )

    def begin(self, rows: RaggedRows) -> Attend:
        """See `FixedAttention.begin`."""
        # Causal masks are aligned with the last key, so padding rows count as keys.
        others = self._requests - self._step.sequences
        starts = pad(rows.starts, (0, others), value=self._step.rows)
        lengths = starts.diff() + pad(rows.contexts, (0, others))
        self._starts.copy_(self._first_pages)
        self._indices.copy_(torch.cat((rows.page_tables.flatten(), self._unowned_pages)))
        # FA2 only uses the sum of the keys in full pages and in the last page, so the latter may be negative.
        self._last.copy_(lengths - (self._starts.diff() - 1) * self._config.page_size)
        if self._step.rows > self._step.sequences:
            # Steps with at most one row per sequence need no correction: result offsets do not change, and chunks
            # without keys get weight 0. A wrapper's plans all have the same layout, which is not part of FlashInfer's
            # interface.
            plan = [int(number) for number in self._wrapper._plan_info]
            Chunks(self._integers, plan, self._requests, self._step.rows).correct(lengths, starts)
        store = self._writer.at(rows.slots.int())

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self._cache.layers[layer]
            store(cache, key, value)
            attended: Tensor = self._wrapper.run(query, cache, out=query.new_empty(query.shape))
            return attended

        return attend

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._config.page_size)


def requests_of(step: StepShape, sharing: int) -> int:
    """Return the number of requests of a wrapper for steps of a shape. sharing: query heads per KV head.

    FlashInfer chooses the tile size for the longest possible request: all rows but one per other request. If most
    sequences have few rows, large tiles are mostly empty, and computing them takes as long as reading the keys. Adding
    empty requests lowers that bound. Longer drafts then need several tiles, each of which reads the keys once.
    """
    smallest = step.sequences + 1
    if step.rows * sharing <= SMALL_TILE * step.sequences:
        return max(smallest, step.rows + 1 - SMALL_TILE // sharing)
    return smallest
