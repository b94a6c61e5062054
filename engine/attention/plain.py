"""Attention in plain PyTorch: the reference on every device, and the backend of the CPU.

Keys are padded to whole blocks, and a query is only batched with queries whose context ends in the same block.
Attention for a token therefore sums over the same number of keys whether the token is decoded alone or verified within
a draft, and on CPUs the results are bitwise equal. For prompts, the blocks also avoid most of the work above the causal
diagonal. With latent attention, prompts run in the expanded form and other rows in the absorbed one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import Attention, FixedAttention, RaggedRows, StepShape
from engine.executor.batch import Batch
from engine.models.config import LatentConfig, ModelConfig
from engine.models.latent_attention import Expansion
from engine.models.layers import Attend
from ssd.kernels.jit import BoolBlocks, Int, LongRows, Longs, Nothing, Parents, kernel

KEY_BLOCK = 128
"""Keys are padded to multiples of this number, which is a multiple of the page size."""

QUERY_CLASSES = (2, 8, 32, KEY_BLOCK)
"""Size classes of query blocks; blocks of one class are padded to the longest. A block has at least two queries,
because the CPU's matrix product rounds a single query differently."""


# Columns of query blocks: consecutive queries of one sequence whose contexts end in the same block of keys.
ROW, LENGTH, POSITION, COMMITTED, SEQUENCE, TREE, NODES = range(7)
"""ROW: row of the first query within the batch. POSITION: index of its keys in the sequence's cache; outside of draft
trees this is its position. COMMITTED: number of keys before those of the draft tree. SEQUENCE: index in the batch.
TREE, NODES: offset into the batch's `parents` and number of nodes of the tree that the queries from COMMITTED on
belong to; without one, each attends to all keys up to its own."""


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
        counts, sizes = blocks[:, POSITION] // KEY_BLOCK + 1, np.searchsorted(QUERY_CLASSES, blocks[:, LENGTH])
        kinds = counts * len(QUERY_CLASSES) + sizes
        groups = [self._group(batch, blocks[kinds == kind]) for kind in dict.fromkeys(kinds.tolist())]

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

    def _group(self, batch: Batch, blocks: np.ndarray) -> Group:
        """Return the group of query blocks that attend to the same number of blocks of keys."""
        key_count = int(blocks[0, POSITION] // KEY_BLOCK + 1) * KEY_BLOCK
        longest = int(blocks[:, LENGTH].max())
        width = longest + longest % 2
        rows = np.empty(len(blocks) * width, np.int64)
        mask = np.zeros((len(blocks), self._sharing * width, key_count), bool)
        _fill_group(blocks, batch.parents, self.first_slot, width, rows, mask)
        return Group(
            rows=self.on_device(rows),
            pages=self._pages_of(batch, blocks, key_count // self._page_size),
            mask=self.on_device(mask[:, None]),
        )

    def _pages_of(self, batch: Batch, blocks: np.ndarray, count: int) -> Tensor | slice:
        held = batch.pages[blocks[:, SEQUENCE], :count]
        if len(blocks) == 1:
            end = blocks[0, POSITION] + blocks[0, LENGTH]
            pages = held[0, : -(-end // self._page_size)]
            if (np.diff(pages) == 1).all():
                return slice(int(pages[0]), int(pages[0]) + count)
        tables = np.zeros((len(blocks), count), np.int64)
        tables[:, : held.shape[1]] = held
        return self.on_device(tables.ravel())

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


def query_blocks(batch: Batch) -> np.ndarray:
    """Return the tokens of every sequence of a batch, split where their contexts reach the next block of keys.

    The result has a row of the columns above for each block, int64 [blocks, 7].
    """
    blocks = np.empty((int((batch.lengths // KEY_BLOCK + 2).sum()), NODES + 1), np.int64)
    return blocks[: _fill_blocks(batch.starts, batch.computed, batch.nodes, blocks)]


@kernel(Longs, Longs, Longs, LongRows, returns=Int)
def _fill_blocks(starts, computed, nodes, blocks):
    count = 0
    for index in range(len(computed)):
        length, done, size = starts[index + 1] - starts[index], 0, nodes[index + 1] - nodes[index]
        while done < length:
            position, block = computed[index] + done, blocks[count]
            block[ROW], block[POSITION], block[COMMITTED] = (
                starts[index] + done,
                position,
                computed[index] + length - size,
            )
            block[LENGTH] = min(length - done, KEY_BLOCK - position % KEY_BLOCK)
            block[SEQUENCE], block[TREE], block[NODES] = index, nodes[index], size
            done += block[LENGTH]
            count += 1
    return count


@kernel(LongRows, Parents, Int, Int, Longs, BoolBlocks, returns=Nothing)
def _fill_group(blocks, parents, first_slot, width, rows, mask):
    """Write the rows and the mask of a `Group`, whose mask has `width` queries for each head that shares keys."""
    for place in range(len(blocks)):
        block = blocks[place]
        for query in range(width):
            within = min(query, block[LENGTH] - 1)
            rows[place * width + query] = block[ROW] + within
            end = block[POSITION] + within
            node = end - block[COMMITTED]
            is_node = node >= 0 and block[NODES] > 0
            keys = mask[place, query]
            keys[first_slot : block[COMMITTED] if is_node else end + 1] = True
            while is_node and node >= 0:
                keys[block[COMMITTED] + node] = True
                node = parents[block[TREE] + node]
        for head in range(width, mask.shape[1]):
            mask[place, head] = mask[place, head - width]


class PlainFixed(FixedAttention):
    """Gathers keys up to the largest possible length for every sequence and masks those beyond its own length."""

    def __init__(self, keys: Tensor, values: Tensor | None, shape: StepShape, first_slot: int = 0) -> None:
        """keys, values: the cache, [layers, pages, page size, kv_heads, head_dim] each; values are None if they are the
        first components of keys. first_slot: see `make_attention`.
        """
        self._keys = keys
        self._values = values
        self._shape = shape
        self._first_slot = first_slot
        self._pages = 0

    def plan(self, contexts: np.ndarray, rows: np.ndarray) -> None:  # the device has them
        """See `FixedAttention.plan`."""
        self._pages = -(-(int(contexts.max()) + self._shape.width) // self._keys.shape[2])

    def begin(self, rows: RaggedRows) -> Attend:
        """See `FixedAttention.begin`."""
        batch, count, width, _ = self._shape
        pages = rows.page_tables[:, : self._pages].long()
        key_positions = torch.arange(pages.shape[1] * self._keys.shape[2], device=pages.device)
        positions = rows.contexts[:, None] + torch.arange(width, device=pages.device)
        mask = ((key_positions <= positions[:, :, None]) & (key_positions >= self._first_slot))[:, None]
        # Index of each row in a padded [sequence, row] grid; padding rows after the last sequence share one extra cell.
        row = torch.arange(count, device=pages.device, dtype=torch.int32)
        owner = torch.searchsorted(rows.starts[1:], row, right=True)
        cell = torch.where(owner < batch, owner * width + row - rows.starts[owner], batch * width)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys = self._keys[layer]
            keys.flatten(0, 1).index_copy_(0, rows.slots, key)
            values = keys  # for latent attention; see `PlainAttention`
            if self._values is not None:
                values = self._values[layer]
                values.flatten(0, 1).index_copy_(0, rows.slots, value)
            queries = query.new_zeros(batch * width + 1, *query.shape[1:]).index_copy(0, cell, query)
            queries = queries[:-1].unflatten(0, (batch, width)).transpose(1, 2)
            all_keys, all_values = (cached[pages].flatten(1, 2).transpose(1, 2) for cached in (keys, values))
            attended = F.scaled_dot_product_attention(queries, all_keys, all_values, mask, enable_gqa=True)
            attended = attended[..., : value.shape[-1]]
            return F.pad(attended.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))[cell]

        return attend


def are_prompts(batch: Batch, latent: LatentConfig) -> np.ndarray:
    """Return for which sequences attention takes fewer operations in the expanded form than in the absorbed one.

    Expanding takes latent * (nope + value) operations for each entry and head. Each query then saves
    2 * latent - nope - value operations for each entry and head. The result is bool [B].
    """
    size = latent.nope_dim + latent.value_dim
    are_long = batch.lengths * (2 * latent.latent_dim - size) > latent.latent_dim * size
    return are_long & (np.diff(batch.nodes) == 0)


class LatentPlainAttention(PlainAttention):
    """`PlainAttention` over latents, which runs prompts in the expanded form."""

    def begin(self, batch: Batch) -> Attend:
        """See `Attention.begin`."""
        assert self.config.latent is not None
        is_prompt = are_prompts(batch, self.config.latent)
        if not is_prompt.any():
            return super().begin(batch)
        prompts, others = np.flatnonzero(is_prompt), np.flatnonzero(~is_prompt)
        rest = super().begin(batch.take(others)) if len(others) else None
        return PromptAttend(self, batch, prompts, others, rest)

    def pages_of(self, batch: Batch, index: int, end: int) -> Tensor:
        """Return the pages of the first `end` entries of a sequence, int64."""
        return self.on_device(batch.pages[index, : -(-end // self._page_size)].astype(np.int64))

    def entries(self, layer: int, pages: Tensor, first: int, end: int) -> Tensor:
        """Return the entries of a sequence from slot `first` to `end`, [end - first, latent + head_dim]."""
        return self._keys[layer][pages].flatten(0, 2)[first:end]


class PromptAttend:
    """Attention of one step with prompts; see `LatentAttend`. Called as `Attend`, it runs the other rows."""

    def __init__(
        self,
        attention: LatentPlainAttention,
        batch: Batch,
        prompts: np.ndarray,
        others: np.ndarray,
        rest: Attend | None,
    ) -> None:
        """prompts: int64, indices of sequences of the batch to expand. others: those that `rest` runs, None if there
        are none.
        """
        self._attention = attention
        self._rest = rest
        self._rest_rows = attention.on_device(batch.rows_of(others))
        rows = batch.rows_of(prompts)
        self._prompt_rows, self._slots = attention.on_device(rows), attention.on_device(batch.slots[rows])
        self._prompts = [self._span_of(batch, index) for index in prompts.tolist()]

    def _span_of(self, batch: Batch, index: int) -> tuple[slice, int, Tensor]:
        """Return the rows of a sequence, its number of tokens after them, and its pages."""
        rows, end = slice(*batch.starts[index : index + 2].tolist()), int(batch.computed[index] + batch.lengths[index])
        return rows, end, self._attention.pages_of(batch, index, end)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Run the rows outside of prompts in the absorbed form."""
        assert self._rest is not None
        return self._rest(layer, query, key, value)

    def attend_latent(self, layer: int, query: Tensor, entries: Tensor, expansion: Expansion) -> Tensor:
        """See `LatentAttend.attend_latent`."""
        self._attention.store(layer, self._slots, entries[self._prompt_rows, None])
        attended = query.new_empty(*query.shape[:2], expansion.value_dim)
        if self._rest is not None:
            others = self._rest_rows
            attended[others] = expansion.absorbed(layer, query[others], entries[others], self)
        for rows, end, pages in self._prompts:
            cached = self._attention.entries(layer, pages, self._attention.first_slot, end)
            attended[rows] = expansion.expanded(query[rows], cached)
        return attended
