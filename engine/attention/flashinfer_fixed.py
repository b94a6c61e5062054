"""Attention of a fixed shape by FlashInfer's FA2 kernel, planned with upper bounds of lengths.

All that the host says in a plan is how long contexts may be, by which the work is divided. True lengths and page
tables, which the device has, take the place of those in a CUDA graph: FA2 reads them there, and `chunks.py` corrects
the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.cache import PagedCache
from engine.attention.calls import Shape
from engine.attention.chunks import Chunks
from engine.attention.fixed import FixedAttention, Grid
from engine.attention.layout import indptr, last_page_lengths
from engine.attention.planned import Planned
from engine.models.decoder import Attend

Store = Callable[[Tensor, Tensor, Tensor], None]
"""Stores new keys and values, [N, kv_heads, d] each, in a layer's cache, which comes first."""


class FlashInferFixed(FixedAttention):
    """One wrapper of B sequences by Q tokens with page tables of P pages each."""

    def __init__(
        self,
        library: Any,
        shape: Shape,
        floats: Tensor,
        integers: Tensor,
        cache: PagedCache,
        sequences: int,
        tokens: int,
        pages: int,
    ) -> None:
        """floats: a workspace that others use too. integers: one of its own; for both see `chunks.workspaces`."""
        self._shape = shape
        self._cache = cache
        self._append = Append(library, cache)
        self._sequences = sequences
        self._tokens = tokens
        self._pages = pages
        self._queries = torch.arange(sequences + 1, dtype=torch.int32) * tokens
        kind: dict[str, Any] = {"dtype": torch.int32, "device": shape.device}
        self._no_indices = torch.zeros(0, **kind)
        self._even_starts = torch.arange(sequences + 1, **kind) * pages
        self._starts = torch.zeros(sequences + 1, **kind)
        self._indices = torch.zeros(sequences * pages, **kind)
        self._last = torch.ones(sequences, **kind)
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            floats,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(sequences + 1, **kind),
            paged_kv_indptr_buf=self._starts,
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=self._last,
            backend="fa2",
        )
        # Its own takes 8 MiB of the device and 8 of pinned memory, for each shape.
        self._integers = integers
        self._wrapper.reset_workspace_buffer(floats, integers)
        self._planned = Planned(self._wrapper, shape.device)

    def plan(self, tables: Sequence[list[int]], contexts: Sequence[int]) -> None:  # noqa: ARG002  # the device has them
        """See `FixedAttention.plan`."""
        shape = self._shape
        lengths = np.asarray(contexts) + self._tokens
        counts = -(-lengths // shape.page_size)
        self._planned.plan(
            self._queries,
            torch.from_numpy(indptr(counts)),
            self._no_indices,
            torch.from_numpy(last_page_lengths(lengths, counts, shape.page_size)),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
            # Without it tiles would be made for one sequence with nearly all tokens.
            uniform_q_len=self._tokens,
        )

    def begin(self, grid: Grid) -> Attend:
        """See `FixedAttention.begin`."""
        # Causal masks end with the last token, so padding counts as if it were in the cache. Tables are all of one
        # size; of that and the keys in the last page only the sum is read, so those may be less than none.
        lengths = grid.contexts + self._tokens
        self._starts.copy_(self._even_starts)
        self._indices.copy_(grid.page_tables.flatten())
        self._last.copy_(lengths - (self._pages - 1) * self._shape.page_size)
        if self._tokens > 1:  # of a single row nothing moves, and a chunk without keys weighs nothing
            # All plans of a wrapper have the same layout, which no public name tells.
            plan = [int(number) for number in self._wrapper._plan_info]
            Chunks(self._integers, plan, self._sequences, self._tokens).correct(lengths)
        store = self._append.at(grid.slots.int())

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self._cache.layers[layer]
            store(cache, key, value)
            attended: Tensor = self._wrapper.run(query, cache, out=query.new_empty(query.shape))
            return attended

        return attend


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
                key.to(cache.dtype),
                value.to(cache.dtype),
                sequence,
                slots,
                cache,
                self._pages,
                self._indptr,
                self._last,
            )

        return store
