"""Attention in plain PyTorch: the reference on every device, and the backend of the CPU.

Keys are attended to in whole blocks from a sequence's start, and queries only with others whose context ends in
the same block. So the sums behind a token's attention have the same length whether the token is decoded alone or
verified within a draft, and on CPUs come out equal to the last bit. The blocks also spare prompts most of the
work above the causal diagonal.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import Attention
from engine.attention.fixed import StepShape
from engine.attention.plain_fixed import PlainFixed
from engine.executor.batch import Batch
from engine.models.config import ModelConfig
from engine.models.decoder import Attend

KEY_BLOCK = 128
"""Keys are padded to multiples of this many, a multiple of the page size."""

QUERY_CLASSES = (2, 8, 32, KEY_BLOCK)
"""Pieces of up to so many queries are padded to one another. One query alone would take another path through the
CPU's matrix product than two, with other rounding."""


@dataclass(frozen=True)
class Piece:
    """Queries of one sequence whose contexts end in the same block of keys."""

    row: int
    """The first query's row within the batch."""
    length: int
    position: int
    """The first query's place in the cache, which outside of draft trees is its position."""
    pages: list[int]
    """The sequence's page table."""
    mask: np.ndarray | None = None
    """bool [length, K]: keys that each query may see, if those are not just all up to its own."""


@dataclass(frozen=True, eq=False)
class Group:
    """B pieces that attend in one call: Q queries each, K keys each."""

    rows: Tensor
    """int64 [B * Q]: rows of the batch; padding repeats a piece's last one."""
    pages: Tensor | slice
    """int64 [B * K / page size]: pages of the cache. A slice of them if B is 1 and they are neighbours."""
    mask: Tensor
    """bool [B, 1, G * Q, K]: which key each query may see, once for each of the G heads that share keys."""


class PlainAttention(Attention):
    """Gathers each sequence's keys and values and calls PyTorch's scaled dot-product attention."""

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        *,
        kv_layers: int = 0,
    ) -> None:
        """kv_layers: see `PagedCache`. Raises ValueError for a page size that does not divide a block of keys."""
        if KEY_BLOCK % page_size:
            raise ValueError(f"the page size must divide {KEY_BLOCK}, not be {page_size}")
        # The last block of the last page's sequence may reach beyond that page.
        pages += KEY_BLOCK // page_size
        shape = (config.num_layers + kv_layers, pages, page_size, config.num_kv_heads, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._scratch = [self._keys.new_empty(0, 0) for _ in range(2)]
        self._sharing = config.num_heads // config.num_kv_heads
        self._page_size = page_size
        self._device = device

    def begin(self, batch: Batch) -> Attend:
        """Attention for one step; see `Attention.begin`."""
        slots = self._on_device(batch.slots)
        pieces = cut_into_pieces(batch)
        alike: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for piece in pieces:
            query_class = next(size for size in QUERY_CLASSES if piece.length <= size)
            alike[piece.position // KEY_BLOCK + 1, query_class].append(piece)
        groups = [self._group(members, blocks * KEY_BLOCK) for (blocks, _), members in alike.items()]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys.flatten(0, 1).index_copy_(0, slots, key)
            values.flatten(0, 1).index_copy_(0, slots, value)
            if len(pieces) == 1:
                return self._attend_group(groups[0], query, keys, values)[: len(query)]
            attended = torch.empty_like(query)
            for group in groups:
                # Padding writes a row's own result once more.
                attended.index_copy_(0, group.rows, self._attend_group(group, query, keys, values))
            return attended

        return attend

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy keys and values between slots; see `Attention.move`."""
        read, written = self._on_device(sources), self._on_device(targets)
        for cached in (self._keys, self._values):
            slots = cached.flatten(1, 2)
            slots.index_copy_(1, written, slots.index_select(1, read))

    def fixed(self, step: StepShape) -> PlainFixed:
        """Attention for steps of a fixed shape; see `Attention.fixed`."""
        return PlainFixed(self._keys, self._values, step)

    def _group(self, pieces: list[Piece], key_count: int) -> Group:
        longest = max(piece.length for piece in pieces)
        query_count = longest + longest % 2
        starts, lengths, positions = (
            np.array([[getattr(piece, field)] for piece in pieces]) for field in ("row", "length", "position")
        )
        within = np.minimum(np.arange(query_count), lengths - 1)
        mask = np.arange(key_count) <= (positions + within)[:, :, None]
        for index, piece in enumerate(pieces):
            if piece.mask is not None:
                mask[index] = piece.mask[within[index]]
        rows = (starts + within).ravel()
        return Group(
            rows=self._on_device(rows),
            pages=self._pages_of(pieces, key_count // self._page_size),
            mask=self._on_device(np.tile(mask[:, None], (1, 1, self._sharing, 1))),
        )

    def _pages_of(self, pieces: list[Piece], count: int) -> Tensor | slice:
        page_tables = np.zeros((len(pieces), count), np.int64)
        for table, piece in zip(page_tables, pieces, strict=True):
            pages = piece.pages[:count]
            table[: len(pages)] = pages
            first = pages[0]
            if len(pieces) == 1 and pages == list(range(first, first + len(pages))):
                return slice(first, first + count)
        return self._on_device(page_tables.ravel())

    def _attend_group(self, group: Group, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of one group.

        query [N, heads, d], cached keys and values [pages, page size, kv_heads, d] -> [B * Q, heads, d].
        """
        pieces, _, folded_queries, key_count = group.mask.shape
        kv_heads, width = keys.shape[2:]
        sharing = query.shape[1] // kv_heads
        # The heads that share keys become further queries, so that keys need not be repeated for them.
        queries = query[group.rows].view(pieces, -1, kv_heads, sharing, width).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(pieces, kv_heads, folded_queries, width)
        key, value = (
            self._gather(cached, group.pages, kind).view(pieces, key_count, kv_heads, width)
            for kind, cached in enumerate((keys, values))
        )
        attended = F.scaled_dot_product_attention(queries, key.transpose(1, 2), value.transpose(1, 2), group.mask)
        unfolded = attended.view(pieces, kv_heads, sharing, -1, width).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(-1, kv_heads * sharing, width)

    def _gather(self, cached: Tensor, pages: Tensor | slice, kind: int) -> Tensor:
        """Pages of a layer's keys (kind 0) or values (kind 1), valid until the next call for that kind."""
        if isinstance(pages, slice):
            return cached[pages]
        rows = cached.flatten(1)
        if len(self._scratch[kind]) < len(pages):
            # Memory fresh from the system would cost more than the copy.
            self._scratch[kind] = rows.new_empty(2 * len(pages), rows.shape[1])
        return torch.index_select(rows, 0, pages, out=self._scratch[kind][: len(pages)])

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def cut_into_pieces(batch: Batch) -> list[Piece]:
    """Every sequence's tokens of a batch, cut where their contexts reach into another block of keys."""
    pieces = []
    for span in batch.spans:
        done = 0
        while done < span.length:
            position = span.computed + done
            length = min(span.length - done, KEY_BLOCK - position % KEY_BLOCK)
            mask = None if span.tree is None else _mask(span.tree.sees, span.committed, position, length)
            pieces.append(Piece(span.start + done, length, position, span.pages, mask))
            done += length
    return pieces


def _mask(sees: np.ndarray, committed: int, first: int, length: int) -> np.ndarray:
    """Which keys the tokens at some places of a sequence see, bool [length, K], K up to the end of their block.

    The token at place `committed` + i is the i-th of a draft tree; `sees`, bool [k, k], is its `DraftTree.sees`.
    """
    key_count = (first // KEY_BLOCK + 1) * KEY_BLOCK
    places = np.arange(first, first + length)
    mask = np.arange(key_count) <= places[:, None]
    drafted = places >= committed
    keys = np.arange(committed, min(committed + len(sees), key_count))
    mask[np.ix_(drafted, keys)] = sees[np.ix_(places[drafted] - committed, keys - committed)]
    return mask
