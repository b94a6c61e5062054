"""Attention and the small operations of a decoder on FlashInfer's kernels, for GPUs.

For steps of a fixed shape, the host plans with the number of rows of each sequence and upper bounds of the contexts. In
a CUDA graph the true lengths and page tables, which are on the device, replace those bounds: FA2 reads them there, and
`calls.Chunks` corrects the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.attention.base import Attention, FixedAttention, RaggedRows, StepShape
from engine.attention.calls import (
    WORKSPACE_BYTES,
    CacheWriter,
    Chunks,
    KernelConfig,
    PagedCache,
    PlannedWrapper,
    Segment,
    flat_masks,
    indptr,
    last_page_lengths,
    rows_of,
    segments_of,
    workspaces,
)
from engine.executor.batch import Batch
from engine.executor.transfer import on_device, staged
from engine.models.config import ModelConfig
from engine.models.layers import Attend, Ops, Rotation
from ssd.errors import missing_extra

Call = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Returns the attention of rows in one layer, [N, heads, head_dim]: query [N, heads, head_dim], new key and value
[N, kv_heads, head_dim], and the layer's cache, which already contains them."""
SMALL_TILE = 16
"""Number of query heads in FA2's smallest tile."""


def has_flashinfer() -> bool:
    """Return whether FlashInfer is installed, whether or not a device can run it."""
    return find_spec("flashinfer") is not None


@cache
def flashinfer() -> Any:
    """Import and return FlashInfer. Raises UserError if that fails."""
    try:
        import flashinfer
    except (ImportError, OSError) as problem:
        raise missing_extra(
            f"FlashInfer cannot be imported ({problem}); give --attention plain or install FlashInfer", "gpu"
        ) from None
    return flashinfer


class FlashInferAttention(Attention):
    """Attention on FlashInfer's kernels over a paged cache."""

    def __init__(self, config: ModelConfig, pages: int, page_size: int, dtype: torch.dtype, device: str) -> None:
        """dtype: of queries and of the cache, 16 bits. Raises UserError where FlashInfer cannot be imported."""
        self._library = flashinfer()
        self._cache = PagedCache(config, pages, page_size, dtype, device)
        self._config = KernelConfig(
            config.num_heads, config.num_kv_heads, config.head_dim, page_size, dtype, str(device)
        )
        self._workspace = self._bytes(WORKSPACE_BYTES)
        self._writer = CacheWriter(self._library, self._cache)

    def begin(self, batch: Batch) -> Attend:
        """See `Attention.begin`."""
        device = torch.device(self._config.device)
        store = self._writer.at(on_device(batch.slots.astype(np.int32), device))
        segments = segments_of(batch)
        # One call handles all paths, so that a step with prompts is planned once.
        parts = (
            ([segment for segment in segments if segment.mask is None], self._plan_paths),
            ([segment for segment in segments if segment.mask is not None], self._plan_trees),
        )
        planned: list[tuple[slice | Tensor, Call]] = []
        for own, plan in parts:
            if own:
                rows = rows_of(own)
                planned.append((rows if isinstance(rows, slice) else on_device(rows, device), plan(own)))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self._cache.layers[layer]
            store(cache, key, value)
            if len(planned) == 1:
                return planned[0][1](query, key, value, cache)
            attended = query.new_empty(query.shape)
            for rows, run in planned:
                attended[rows] = run(query[rows], key[rows], value[rows], cache)
            return attended

        return attend

    def _plan_paths(self, segments: Sequence[Segment]) -> Call:
        """Plan FA2 over paged keys, causal, for paths of any length."""
        wrapper = self._paths
        wrapper.plan_paged(segments, [segment.keys for segment in segments], causal=True)
        return lambda query, _key, _value, cache: wrapper.run(query, cache, out=query.new_empty(query.shape))

    def _plan_trees(self, segments: Sequence[Segment]) -> Call:
        """Plan FA2 for trees: the context without a mask and the tree with a small one, merged by FlashInfer's kernel.

        Attention over all keys is the mean of the attention over each part, weighted by the parts' sums of exponentials
        (Milakov and Gimelshein, 2018). Masks therefore do not grow with the context.
        """
        contexts, trees = self._trees
        contexts.plan_paged(segments, [segment.context for segment in segments])
        rows = torch.from_numpy(indptr([segment.length for segment in segments]))
        mask = on_device(flat_masks(segments), torch.device(self._config.device))
        # In parts, a token might attend to no key of some part.
        trees.plan(rows, rows, custom_mask=mask, disable_split_kv=True)

        def run(query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
            parts = contexts.run(query, cache, return_lse=True), trees.run(query, key, value, return_lse=True)
            attended: Tensor = self._library.merge_state(*parts[0], *parts[1])[0]
            return attended

        return run

    # Wrappers are made on first use, because each allocates memory. They run one after another on the same CUDA stream,
    # so they share a workspace.

    @cached_property
    def _paths(self) -> PlannedWrapper:
        return self._wrapper(self._library.BatchPrefillWithPagedKVCacheWrapper)

    @cached_property
    def _trees(self) -> tuple[PlannedWrapper, PlannedWrapper]:
        ragged = self._library.BatchPrefillWithRaggedKVCacheWrapper
        return self._wrapper(self._library.BatchPrefillWithPagedKVCacheWrapper), self._wrapper(ragged)

    def _wrapper(self, kind: Callable[..., Any]) -> PlannedWrapper:
        return PlannedWrapper(kind(self._workspace, "NHD", backend="fa2"), self._config)

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """See `Attention.move`."""
        self._cache.move(sources, targets)

    def fixed(self, step: StepShape) -> FlashInferFixed:
        """See `Attention.fixed`."""
        config = self._config
        requests = requests_of(step, config.heads // config.kv_heads)
        floats, integers = workspaces(config.heads, config.kv_heads, config.head_dim, requests, step.rows)
        if floats > len(self._workspace):
            # Existing calls and shapes keep their smaller workspace.
            self._workspace = self._bytes(floats)
        return FlashInferFixed(self._library, config, self._workspace, self._bytes(integers), self._cache, step)

    def _bytes(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self._config.device)


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
        `calls.workspaces`.

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
        after = -(-step.rows // config.page_size)
        self._unowned_pages = torch.full((after,), cache.pages - 1, **integers_there)
        # First index of each page table; the tables of the B sequences have equal lengths.
        firsts = torch.arange(step.sequences + 1, **integers_there) * step.pages
        others = self._requests - step.sequences
        self._first_pages = pad(firsts, (0, others), value=step.sequences * step.pages + after)
        self._starts = torch.zeros(self._requests + 1, **integers_there)
        self._indices = torch.zeros(step.sequences * step.pages + after, **integers_there)
        self._last = torch.ones(self._requests, **integers_there)
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
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
        wrapper.reset_workspace_buffer(floats, integers)
        self._planned = PlannedWrapper(wrapper, config)

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
            page_size=config.page_size,
            causal=True,
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
            plan = [int(number) for number in self._planned.wrapper._plan_info]
            Chunks(self._integers, plan, self._requests, self._step.rows).correct(lengths, starts)
        store = self._writer.at(rows.slots.int())

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self._cache.layers[layer]
            store(cache, key, value)
            attended: Tensor = self._planned.run(query, cache, out=query.new_empty(query.shape))
            return attended

        return attend


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


class FusedOps(Ops):
    """Runs each operation as one kernel that computes in float32. For inference only: inputs may be overwritten."""

    def __init__(self) -> None:
        """Raise UserError if FlashInfer cannot be imported."""
        self._flashinfer = flashinfer()

    def add_norm(self, residual: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_norm`."""
        if change is None:
            return residual, self._flashinfer.rmsnorm(residual, weight, eps)
        self._flashinfer.fused_add_rmsnorm(change, residual, weight, eps)
        return residual, change

    def norm_heads(self, heads: Tensor, query_weight: Tensor, key_weight: Tensor, count: int, eps: float) -> Tensor:
        """See `Ops.norm_heads`."""
        for part, weight in ((heads[:, :count], query_weight), (heads[:, count:], key_weight)):
            self._flashinfer.rmsnorm(part, weight, eps, out=part)
        return heads

    def rotation(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotation:  # noqa: ARG002  # any dtype
        """See `Ops.rotation`."""
        # The kernel looks up angles in a table by position. This table has one row for each token of the step.
        half = cos.shape[-1] // 2
        table = torch.cat((cos[:, 0, :half], sin[:, 0, :half]), dim=-1)
        rows = torch.arange(len(table), device=table.device)

        def rotate(heads: Tensor) -> Tensor:
            # The kernel takes two tensors of heads and treats them alike.
            first, last = heads[:, :-1], heads[:, -1:]
            self._flashinfer.apply_rope_with_cos_sin_cache_inplace(rows, first, last, heads.shape[-1], table)
            return heads

        return rotate

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Ops.gate`."""
        gated: Tensor = self._flashinfer.silu_and_mul(gate_up)
        return gated
