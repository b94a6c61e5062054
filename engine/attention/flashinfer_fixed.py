"""Attention of a fixed shape by FlashInfer's FA2 kernel, planned with upper bounds of lengths.

A plan copies page tables and bounds into buffers that a CUDA graph may hold. In the graph the true lengths, which the
device alone knows, take the place of the bounds: FA2 reads them there, and `chunks.py` corrects what was planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention.cache import PagedCache
from engine.attention.calls import Shape, plan_paged
from engine.attention.chunks import Chunks
from engine.attention.fixed import FixedAttention, Grid
from engine.attention.layout import Piece
from engine.attention.planned import Planned
from engine.models.decoder import Attend

Store = Callable[[Tensor, Tensor, Tensor], None]
"""Stores new keys and values, [N, kv_heads, d] each, in a layer's cache, which comes first."""


class FlashInferFixed(FixedAttention):
    """One wrapper of B sequences by Q tokens; its buffers hold `pages` pages of each sequence and padding behind."""

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
        """floats: a workspace that others use too. integers: one of its own; for both see `chunks.workspaces`.

        The cache has a page of nobody behind all others.
        """
        self._shape = shape
        self._cache = cache
        self._append = Append(library, cache)
        self._sequences = sequences
        self._tokens = tokens
        most_pages = sequences * (pages + -(-tokens // shape.page_size))
        kind: dict[str, Any] = {"dtype": torch.int32, "device": shape.device}
        self._starts = torch.zeros(sequences + 1, **kind)
        self._last = torch.ones(sequences, **kind)
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            floats,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(sequences + 1, **kind),
            paged_kv_indptr_buf=self._starts,
            paged_kv_indices_buf=torch.zeros(most_pages, **kind),
            paged_kv_last_page_len_buf=self._last,
            backend="fa2",
        )
        # Its own takes 8 MiB of the device and 8 of pinned memory, for each shape.
        self._integers = integers
        self._wrapper.reset_workspace_buffer(floats, integers)
        self._planned = Planned(self._wrapper, shape.device)

    def plan(self, tables: Sequence[list[int]], contexts: Sequence[int]) -> None:
        """See `FixedAttention.plan`."""
        pieces = [
            Piece(index * self._tokens, self._tokens, context, self._whole(table, context + self._tokens))
            for index, (table, context) in enumerate(zip(tables, contexts, strict=True))
        ]
        # Without `uniform_q_len` tiles would be made for one sequence with nearly all tokens.
        plan_paged(
            self._planned,
            self._shape,
            pieces,
            [piece.keys for piece in pieces],
            causal=True,
            uniform_q_len=self._tokens,
        )

    def begin(self, grid: Grid) -> Attend:
        """See `FixedAttention.begin`."""
        # Causal masks end with the last token, so padding counts as if it were in the cache.
        lengths = grid.contexts + self._tokens
        self._last.copy_(lengths - (self._starts.diff() - 1) * self._shape.page_size)
        # Its plans all have the same layout, which no public name of the wrapper tells.
        plan = [int(number) for number in self._wrapper._plan_info]
        Chunks(self._integers, plan, self._sequences, self._tokens).correct(lengths)
        store = self._append.at(grid.slots.int())

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self._cache.layers[layer]
            store(cache, key, value)
            attended: Tensor = self._wrapper.run(query, cache, out=query.new_empty(query.shape))
            return attended

        return attend

    def _whole(self, table: list[int], keys: int) -> list[int]:
        """A page table with nobody's page where it has none for so many keys."""
        pages = -(-keys // self._shape.page_size)
        return [*table[:pages], *[self._cache.pages - 1] * (pages - len(table))]


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
