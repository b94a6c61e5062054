"""Calls of FlashInfer's kernels: each attention call is planned once per step, then run in every layer.

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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention import layout
from engine.attention.layout import Segment
from engine.executor.transfer import on_device
from engine.models.config import ModelConfig
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
        self._wrapper = wrapper
        self._config = config
        self._copied = torch.cuda.Event() if torch.device(config.device).type == "cuda" else None

    def plan(self, *arrays: Tensor, **options: Any) -> None:
        """Plan a step. arrays, options: arguments of the wrapper's `plan` besides the sizes of heads and the dtypes."""
        config = self._config
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(
            *arrays,
            config.heads,
            config.kv_heads,
            config.head_dim,
            q_data_type=config.dtype,
            kv_data_type=config.dtype,
            **options,
        )
        if self._copied is not None:
            self._copied.record()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the planned step; the arguments are those of the wrapper's `run`."""
        return self._wrapper.run(*args, **kwargs)


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


class PathCall:
    """FA2 over paged keys, causal, for paths of any length.

    Calls run one after another on the same CUDA stream, so they share a workspace.
    """

    def __init__(self, library: Any, config: KernelConfig, workspace: Tensor) -> None:
        """library: the FlashInfer module."""
        self._wrapper = PlannedWrapper(
            library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2"), config
        )
        self._config = config

    def prepare(self, segments: Sequence[Segment]) -> None:
        """Plan the attention of a step's segments."""
        plan_paged(self._wrapper, self._config, segments, [segment.keys for segment in segments], causal=True)

    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:  # noqa: ARG002  # from the cache
        """Return the attention of the segments' rows in one layer, [N, heads, head_dim].

        query [N, heads, head_dim], new key and value [N, kv_heads, head_dim]: only the segments' rows. cache: the
        layer's cache, which already contains the new keys and values.
        """
        return self._wrapper.run(query, cache, out=query.new_empty(query.shape))


class TreeCall:
    """FA2 for trees: the context without a mask and the tree with a small one, merged by FlashInfer's kernel.

    Attention over all keys is the mean of the attention over each part, weighted by the parts' sums of exponentials
    (Milakov and Gimelshein, 2018). Masks therefore do not grow with the context.
    """

    def __init__(self, library: Any, config: KernelConfig, workspace: Tensor) -> None:
        """See `PathCall`."""
        paged = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        ragged = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._contexts, self._trees = PlannedWrapper(paged, config), PlannedWrapper(ragged, config)
        self._merge = library.merge_state
        self._config = config

    def prepare(self, segments: Sequence[Segment]) -> None:
        """See `PathCall.prepare`."""
        plan_paged(self._contexts, self._config, segments, [segment.context for segment in segments])
        rows = torch.from_numpy(layout.indptr([segment.length for segment in segments]))
        mask = on_device(layout.flat_masks(segments), torch.device(self._config.device))
        # In parts, a token might attend to no key of some part.
        self._trees.plan(rows, rows, custom_mask=mask, disable_split_kv=True)

    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `PathCall.run`."""
        context = self._contexts.run(query, cache, return_lse=True)
        tree = self._trees.run(query, key, value, return_lse=True)
        attended: Tensor = self._merge(*context, *tree)[0]
        return attended


def plan_paged(
    wrapper: PlannedWrapper, config: KernelConfig, segments: Sequence[Segment], lengths: Sequence[int], **options: Any
) -> None:
    """Plan segments over the first `lengths` keys of their sequences. options: additional arguments of the plan."""
    indptr, indices, last = layout.paged_keys([segment.pages for segment in segments], lengths, config.page_size)
    wrapper.plan(
        torch.from_numpy(layout.indptr([segment.length for segment in segments])),
        torch.from_numpy(indptr),
        # This array is large and not read on the CPU.
        on_device(indices, torch.device(config.device)),
        torch.from_numpy(last),
        page_size=config.page_size,
        **options,
    )


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


def workspaces(
    heads: int, kv_heads: int, head_dim: int, requests: int, rows: int, processors: int = MAX_PROCESSORS
) -> tuple[int, int]:
    """Return upper bounds of the bytes that a graph-mode plan needs in the float and integer workspaces.

    A plan reserves space for the result of every tile, independent of the lengths. There are enough tiles to fill the
    device twice, or as many as the queries need if that is more.
    """
    sharing = heads // kv_heads
    # Largest number of rows of a request.
    queries = max(0, rows - requests + 1) * sharing
    tile = 16 if queries <= 16 else 128 if queries > 64 and head_dim < 256 else 64
    tiles = max(2 * processors // kv_heads, -(-rows * sharing // tile) + requests - 1)
    results = -(-tiles * tile // sharing)
    return heads * results * (head_dim + 1) * 4 + 64, 16 * tiles + 4 * (requests + rows) + 256
