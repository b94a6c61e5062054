"""What calls of FlashInfer's kernels need: the arrays of a step, its cache, and plans, which are made once per step.

Plans are made from arrays on the CPU, because reading arrays on the device would wait for all work queued there. In
CUDA graphs, FA2's plans are corrected on the device, where true lengths are below the planned ones: a plan lists chunks
of keys, which run in parallel, and the offsets at which the merge reads their results. The kernel, however, writes
results at offsets that follow from the lengths it reads at run time: row r of a sequence of n chunks has its c-th
result at r * n + c. If a true length has fewer chunks than planned, the merge would combine results of different rows,
so the lists are rebuilt from the true lengths.

See flashinfer 0.7.2: `PrefillPlanImpl` in scheduler.cuh, `BatchPrefillWithPagedKVCacheDevice` in prefill.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.executor.batch import Batch
from engine.executor.transfer import on_device
from engine.models.config import ModelConfig
from engine.speculation.draft_tree import DraftTree
from ssd.errors import UserError

Store = Callable[[Tensor, Tensor, Tensor], None]
"""Stores new keys and values, [N, kv_heads, d] each, in a layer's cache, which is the first argument."""
WORKSPACE_BYTES = 128 << 20
"""FlashInfer's recommended workspace size for partial results of split keys. Plans of ragged steps split keys only
until the device is full, so this suffices for any batch. For steps of fixed shapes see `workspaces`."""
FIELDS = 15
"""Length of a plan."""
TILES, REQUESTS, CHUNKS, MERGED, FIRSTS, CHUNK_SIZE, VALID = 0, 4, 6, 7, 8, 9, 12
"""Indices into a plan: the number of tiles (a block of queries by a chunk of keys), and byte offsets in the integer
workspace."""
MAX_PROCESSORS = 256
"""Upper bound of a GPU's number of multiprocessors; workspaces are a few MiB larger than needed."""


class Segment(NamedTuple):
    """Consecutive tokens of one sequence: a path, or a draft tree with its root."""

    start: int
    """Row of the first token within the batch."""
    length: int
    context: int
    """Number of the sequence's tokens before the segment; all tokens of the segment attend to them."""
    pages: list[int]
    """The sequence's page table."""
    mask: np.ndarray | None = None
    """bool [length, length]: the segment's tokens that each token of a tree attends to; None for a path."""

    @property
    def keys(self) -> int:
        """Number of the sequence's tokens up to the segment's end."""
        return self.context + self.length


class PagedKeys(NamedTuple):
    """Pages of the keys of B segments, all int32."""

    indptr: np.ndarray
    """[B + 1], into `indices`."""
    indices: np.ndarray
    """Pages of the cache. A segment without keys also has one page, so that no table is empty."""
    last_page_len: np.ndarray
    """[B]: number of keys in the last page."""


def segments_of(batch: Batch) -> list[Segment]:
    """Return the segments of a batch, in its order.

    A draft tree is a separate segment with the last committed token as its root, so that every token attends to the
    whole context and to at least one token of its segment.
    """
    segments = []
    for index, (start, end) in enumerate(pairwise(batch.starts.tolist())):
        computed, pages = int(batch.computed[index]), batch.pages[index].tolist()
        parents = batch.parents[batch.nodes[index] : batch.nodes[index + 1]]
        if not len(parents):
            segments.append(Segment(start, end - start, computed, pages))
            continue
        before = end - start - len(parents) - 1
        if before:
            segments.append(Segment(start, before, computed, pages))
        mask = with_root(DraftTree(parents).sees)
        segments.append(Segment(start + before, 1 + len(parents), computed + before, pages, mask))
    return segments


def with_root(mask: np.ndarray) -> np.ndarray:
    """Add a root before all nodes to a tree's mask, bool [k, k]; return bool [k + 1, k + 1]."""
    whole = np.zeros((len(mask) + 1, len(mask) + 1), bool)
    whole[:, 0] = True
    whole[1:, 1:] = mask
    return whole


def indptr(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the first index of each of B consecutive ranges, and the end of the last one, int32 [B + 1]."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def paged_keys(tables: Sequence[list[int]], lengths: Sequence[int], page_size: int) -> PagedKeys:
    """Return the pages of the first `lengths` keys of each page table."""
    counts = [max(1, -(-length // page_size)) for length in lengths]
    indices = np.concatenate([table[:count] for table, count in zip(tables, counts, strict=True)], dtype=np.int32)
    return PagedKeys(indptr(counts), indices, last_page_lengths(lengths, counts, page_size))


def last_page_lengths(
    lengths: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray, page_size: int
) -> np.ndarray:
    """Return the number of keys in the last of `counts` pages, int32 [B]: lengths - (counts - 1) * page_size.

    It is 0 or less where a table has more pages than its length needs; FA2's kernels only use the sum of the keys in
    full pages and in the last page.
    """
    return (np.asarray(lengths) - (np.asarray(counts) - 1) * page_size).astype(np.int32)


def flat_masks(segments: Sequence[Segment]) -> np.ndarray:
    """Return the masks of trees, flattened and concatenated, bool."""
    masks = [np.tri(one.length, dtype=bool) if one.mask is None else one.mask for one in segments]
    return np.concatenate([mask.ravel() for mask in masks])


def rows_of(segments: Sequence[Segment]) -> slice | np.ndarray:
    """Return the rows of segments within the batch, in order: a slice if consecutive, otherwise int64 indices."""
    rows = np.concatenate([np.arange(segment.start, segment.start + segment.length) for segment in segments])
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else rows


class PagedCache:
    """Keys and values of all layers in one tensor, [layers, pages, 2, page_size, kv_heads, head_dim].

    A page holds keys first, then values. A slot is page * page_size + offset.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        shape = (config.num_layers, pages, 2, page_size, config.num_kv_heads, config.head_dim)
        self.layers = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.layers.shape[1]

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy keys and values between slots; see `Attention.move`."""
        from_pages, from_offsets = self._pages_and_offsets(sources)
        to_pages, to_offsets = self._pages_and_offsets(targets)
        self.layers[:, to_pages, :, to_offsets] = self.layers[:, from_pages, :, from_offsets]

    def _pages_and_offsets(self, slots: np.ndarray) -> tuple[Tensor, Tensor]:
        on_device = torch.from_numpy(slots).to(self.layers.device)
        return on_device // self.page_size, on_device % self.page_size


@dataclass(frozen=True)
class KernelConfig:
    """Sizes and dtypes that do not change from step to step."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: str


class PlannedWrapper:
    """A FlashInfer wrapper that can be planned while the device still executes its previous plan.

    A plan is written to the wrapper's pinned memory and copied to the device; the next plan waits for that copy.
    """

    def __init__(self, wrapper: Any, config: KernelConfig) -> None:
        self.wrapper = wrapper
        self.run = wrapper.run
        self._config = config
        self._copied = torch.cuda.Event() if torch.device(config.device).type == "cuda" else None

    def plan(self, *arrays: Tensor, **options: Any) -> None:
        """Plan a step. arrays, options: arguments of the wrapper's `plan` besides the sizes of heads and the dtypes."""
        config = self._config
        if self._copied is not None:
            self._copied.synchronize()
        sizes = (config.heads, config.kv_heads, config.head_dim)
        self.wrapper.plan(*arrays, *sizes, q_data_type=config.dtype, kv_data_type=config.dtype, **options)
        if self._copied is not None:
            self._copied.record()

    def plan_paged(self, segments: Sequence[Segment], lengths: Sequence[int], **options: Any) -> None:
        """Plan segments over the first `lengths` keys of their sequences. options: further arguments of the plan."""
        config = self._config
        starts, indices, last = paged_keys([segment.pages for segment in segments], lengths, config.page_size)
        self.plan(
            torch.from_numpy(indptr([segment.length for segment in segments])),
            torch.from_numpy(starts),
            # This array is large and not read on the CPU.
            on_device(indices, torch.device(config.device)),
            torch.from_numpy(last),
            page_size=config.page_size,
            **options,
        )


class CacheWriter:
    """Stores new keys and values. The kernel gets the whole cache as one sequence, so that a slot is a position."""

    def __init__(self, library: Any, cache: PagedCache) -> None:
        self._library = library
        integers: dict[str, Any] = {"dtype": torch.int32, "device": cache.layers.device}
        self._pages = torch.arange(cache.pages, **integers)
        self._indptr = torch.tensor([0, cache.pages], **integers)
        self._last = torch.tensor([cache.page_size], **integers)

    def at(self, slots: Tensor) -> Store:
        """Return a function that stores the rows of one step. slots: int32 [N]."""
        sequence = torch.zeros_like(slots)

        def store(cache: Tensor, key: Tensor, value: Tensor) -> None:
            self._library.append_paged_kv_cache(
                key, value, sequence, slots, cache, self._pages, self._indptr, self._last
            )

        return store


class Chunks:
    """Arrays of a plan for R requests with N rows in total, as views of the integer workspace."""

    def __init__(self, integers: Tensor, plan: Sequence[int], requests: int, rows: int) -> None:
        """integers: the workspace, uint8. plan: what FlashInfer's planner returned.

        Raises UserError for a plan of an unknown format.
        """
        if len(plan) != FIELDS:
            raise UserError(
                "FlashInfer has an unknown format of plans; install flashinfer-python 0.7.2, or give --attention plain"
            )

        def numbers(field: int, count: int) -> Tensor:
            return integers[plan[field] : plan[field] + 4 * count].view(torch.int32)

        tiles = plan[TILES]
        self._size = numbers(CHUNK_SIZE, 1)
        self._firsts = numbers(FIRSTS, requests + 1)
        self._merged = numbers(MERGED, rows + 1)
        self._valid = integers[plan[VALID] : plan[VALID] + tiles].view(torch.bool)
        # Entries after the valid ones are undefined.
        self._requests = numbers(REQUESTS, tiles)
        self._chunks = numbers(CHUNKS, tiles)

    def correct(self, lengths: Tensor, starts: Tensor) -> None:
        """Rebuild the lists for lengths, int32 [R]: at most the planned ones, at least 1 for requests with rows.

        starts: int32 [R + 1], first row of each request and the end of the last one.
        """
        counts = (lengths + self._size - 1) // self._size
        row = torch.arange(len(self._merged) - 1, device=starts.device, dtype=torch.int32)
        owner = torch.searchsorted(starts[1:], row, right=True)
        self._merged[1:] = counts[owner].cumsum(dim=0)
        self._firsts.copy_(self._merged[starts])
        self._valid &= self._chunks < counts[self._requests.clamp(0, len(counts) - 1).long()]


def workspaces(heads: int, kv_heads: int, head_dim: int, requests: int, rows: int) -> tuple[int, int]:
    """Return upper bounds of the bytes that a graph-mode plan needs in the float and integer workspaces.

    A plan reserves space for the result of every tile, independent of the lengths. There are enough tiles to fill the
    device twice, or as many as the queries need if that is more.
    """
    sharing = heads // kv_heads
    # Largest number of rows of a request.
    queries = max(0, rows - requests + 1) * sharing
    tile = 16 if queries <= 16 else 128 if queries > 64 and head_dim < 256 else 64
    tiles = max(2 * MAX_PROCESSORS // kv_heads, -(-rows * sharing // tile) + requests - 1)
    results = -(-tiles * tile // sharing)
    return heads * results * (head_dim + 1) * 4 + 64, 16 * tiles + 4 * (requests + rows) + 256
