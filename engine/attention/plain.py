"""Attention in plain PyTorch: the reference on every device, and the backend of the CPU.

Keys are padded to whole blocks, and a query is only batched with queries whose context ends in the same block.
Attention for a token therefore sums over the same number of keys whether the token is decoded alone or verified within
a draft, and on CPUs the results are bitwise equal. For prompts, the blocks also avoid most of the work above the causal
diagonal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import Attention, StepShape
from engine.attention.plain_fixed import PlainFixed
from engine.executor.batch import Batch
from engine.models.config import ModelConfig
from engine.models.self_attention import Attend
from engine.speculation.draft_tree import DraftTree
from ssd.kernels.jit import BoolBlocks, Int, LongRows, Longs, Nothing, Parents, kernel

KEY_BLOCK = 128
"""Keys are padded to multiples of this number, which is a multiple of the page size."""

QUERY_CLASSES = (2, 8, 32, KEY_BLOCK)
"""Size classes of query blocks; blocks of one class are padded to the longest. A block has at least two queries,
because the CPU's matrix product rounds a single query differently."""


NO_PARENTS = np.empty(0, np.int32)


class QueryBlock(NamedTuple):
    """Consecutive queries of one sequence whose contexts end in the same block of keys."""

    row: int
    """Row of the first query within the batch."""
    length: int
    position: int
    """Index of the first query's keys in the sequence's cache; outside of draft trees this is its position."""
    committed: int
    """Number of keys before those of the draft tree."""
    pages: list[int]
    """The sequence's page table."""
    tree: DraftTree | None
    """The tree whose nodes the queries from `committed` on are; None if each attends to all keys up to its own."""


@dataclass(frozen=True, eq=False)
class Group:
    """B query blocks that attend in one call: Q queries each, K keys each."""

    rows: Tensor
    """int64 [B * Q]: rows of the batch; padding repeats a block's last one."""
    pages: Tensor | slice
    """int64 [B * K / page size]: pages of the cache; a slice if B is 1 and they are consecutive."""
    mask: Tensor
    """bool [B, 1, G * Q, K]: keys that each query attends to, repeated for each of the G heads that share keys."""


class PlainAttention(Attention):
    """Gathers each sequence's keys and values and calls PyTorch's scaled dot-product attention."""

    runs_tree_parts = True

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        *,
        first_slot: int = 0,
    ) -> None:
        """first_slot: see `make_attention`. Raises ValueError for a page size that does not divide a block of keys."""
        if KEY_BLOCK % page_size:
            raise ValueError(f"the page size must divide {KEY_BLOCK}, not be {page_size}")
        # The last block of keys may extend beyond the last page.
        pages += KEY_BLOCK // page_size
        shape = (config.num_layers, pages, page_size, config.num_kv_heads, config.key_dim)
        self.config = config
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        # The values of latent attention are the first components of its keys.
        self._values = torch.zeros(shape, dtype=dtype, device=device) if config.latent is None else None
        self._scratch = [self._keys.new_empty(0, 0) for _ in range(2)]
        self.first_slot = first_slot
        self._sharing = config.num_heads // config.num_kv_heads
        self._page_size = page_size
        self._device = device

    @property
    def pages(self) -> tuple[Tensor, Tensor | None]:
        """Keys and values of all layers, [layers, pages, page size, kv_heads, key_dim] each.

        The values of latent attention are None, because they are parts of keys.
        """
        return self._keys, self._values

    def begin(self, batch: Batch) -> Attend:
        """See `Attention.begin`."""
        slots = self.on_device(batch.slots)
        blocks = query_blocks(batch)
        classes: dict[tuple[int, int], list[QueryBlock]] = defaultdict(list)
        for block in blocks:
            query_class = bisect_left(QUERY_CLASSES, block.length)
            classes[block.position // KEY_BLOCK + 1, query_class].append(block)
        groups = [self._group(members, count * KEY_BLOCK) for (count, _), members in classes.items()]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.store(layer, slots, key, value)
            if len(blocks) == 1:
                return self._attend_group(groups[0], layer, query, value.shape[-1])[: len(query)]
            attended = query.new_empty(*query.shape[:2], value.shape[-1])
            for group in groups:
                # Padding rows repeat a row and write the same result again.
                attended.index_copy_(0, group.rows, self._attend_group(group, layer, query, value.shape[-1]))
            return attended

        return attend

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor | None = None) -> None:
        """Write to slots of a layer: keys, and values unless they are part of keys, [N, kv_heads, size] each."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        if self._values is not None and value is not None:
            self._values[layer].flatten(0, 1).index_copy_(0, slots, value)

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """See `Attention.move`."""
        read, written = self.on_device(sources), self.on_device(targets)
        for cached in (self._keys,) if self._values is None else (self._keys, self._values):
            slots = cached.flatten(1, 2)
            slots.index_copy_(1, written, slots.index_select(1, read))

    def fixed(self, step: StepShape) -> PlainFixed:
        """See `Attention.fixed`."""
        return PlainFixed(self._keys, self._values, step, self.first_slot)

    def _group(self, blocks: list[QueryBlock], key_count: int) -> Group:
        places = np.array([block[:4] for block in blocks])
        longest = int(places[:, 1].max())
        width = longest + longest % 2
        trees = [NO_PARENTS if block.tree is None else block.tree.parents for block in blocks]
        parents = trees[0] if len(trees) == 1 else np.concatenate(trees)
        offsets = np.array([0, *accumulate(map(len, trees))])
        rows = np.empty(len(blocks) * width, np.int64)
        mask = np.zeros((len(blocks), self._sharing * width, key_count), bool)
        _fill_group(places, parents, offsets, self.first_slot, width, rows, mask)
        return Group(
            rows=self.on_device(rows),
            pages=self._pages_of(blocks, key_count // self._page_size),
            mask=self.on_device(mask[:, None]),
        )

    def _pages_of(self, blocks: list[QueryBlock], count: int) -> Tensor | slice:
        pages = blocks[0].pages[:count]
        if len(blocks) == 1 and pages == list(range(pages[0], pages[0] + len(pages))):
            return slice(pages[0], pages[0] + count)
        page_tables: list[int] = []
        for block in blocks:
            pages = block.pages[:count]
            page_tables += pages
            page_tables += [0] * (count - len(pages))
        return self.on_device(np.array(page_tables, np.int64))

    def _attend_group(self, group: Group, layer: int, query: Tensor, value_dim: int) -> Tensor:
        """Return the attention of one group in a layer, query [N, heads, d] -> [B * Q, heads, value_dim]."""
        blocks, _, folded_queries, key_count = group.mask.shape
        kv_heads, width = self._keys.shape[3:]
        sharing = query.shape[1] // kv_heads
        # Fold heads that share keys into the query dimension, so that keys are not repeated for them.
        queries = query[group.rows].view(blocks, -1, kv_heads, sharing, width).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(blocks, kv_heads, folded_queries, width)
        shape = (blocks, key_count, kv_heads, width)
        key = self._gather(self._keys[layer], group.pages, 0).view(shape)
        # In latent attention, values are the first components of keys; PyTorch is faster if both have the same size.
        value = key
        if self._values is not None:
            value = self._gather(self._values[layer], group.pages, 1).view(shape)
        attended = F.scaled_dot_product_attention(queries, key.transpose(1, 2), value.transpose(1, 2), group.mask)
        unfolded = attended[..., :value_dim].view(blocks, kv_heads, sharing, -1, value_dim).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(-1, kv_heads * sharing, value_dim)

    def _gather(self, cached: Tensor, pages: Tensor | slice, kind: int) -> Tensor:
        """Return pages of a layer's keys (kind 0) or values (kind 1), valid until the next call for that kind."""
        if isinstance(pages, slice):
            return cached[pages]
        rows = cached.flatten(1)
        if len(self._scratch[kind]) < len(pages):
            # Allocating new memory would take longer than the copy.
            self._scratch[kind] = rows.new_empty(2 * len(pages), rows.shape[1])
        return torch.index_select(rows, 0, pages, out=self._scratch[kind][: len(pages)])

    def on_device(self, array: np.ndarray) -> Tensor:
        """Return a tensor of an array's values on the device of the cache."""
        return torch.from_numpy(array).to(self._device)


def query_blocks(batch: Batch) -> list[QueryBlock]:
    """Return the tokens of every sequence of a batch, split where their contexts reach the next block of keys."""
    blocks = []
    for span in batch.spans:
        done, committed = 0, span.committed
        while done < span.length:
            position = span.computed + done
            length = min(span.length - done, KEY_BLOCK - position % KEY_BLOCK)
            blocks.append(QueryBlock(span.start + done, length, position, committed, span.pages, span.tree))
            done += length
    return blocks


@kernel(LongRows, Parents, Longs, Int, Int, Longs, BoolBlocks, returns=Nothing)
def _fill_group(places, parents, offsets, first_slot, width, rows, mask):
    """Write the rows and the mask of a `Group`, whose mask has `width` queries for each head that shares keys.

    places: the first four fields of each block. parents, offsets: the draft tree of each block, without nodes for none.
    """
    for block in range(len(places)):
        row, length, position, committed = places[block]
        for query in range(width):
            within = min(query, length - 1)
            rows[block * width + query] = row + within
            node = position + within - committed
            is_node = node >= 0 and offsets[block] < offsets[block + 1]
            keys = mask[block, query]
            keys[first_slot : committed if is_node else position + within + 1] = True
            while is_node and node >= 0:
                keys[committed + node] = True
                node = parents[offsets[block] + node]
        for head in range(width, mask.shape[1]):
            mask[block, head] = mask[block, head - width]
