"""Calls of FlashInfer's kernels: each attention call is planned once per step, then run in every layer.

Plans are made from arrays on the CPU, because reading arrays on the device would wait for all work queued there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention import layout
from engine.attention.cache import PagedCache
from engine.attention.layout import Segment
from engine.executor.transfer import on_device

Store = Callable[[Tensor, Tensor, Tensor], None]
"""Stores new keys and values, [N, kv_heads, d] each, in a layer's cache, which is the first argument."""
WORKSPACE_BYTES = 128 << 20
"""FlashInfer's recommended workspace size for partial results of split keys. Plans of ragged steps split keys only
until the device is full, so this suffices for any batch. For steps of fixed shapes see `chunks.workspaces`."""


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

    def __init__(self, wrapper: Any, device: str) -> None:
        self._wrapper = wrapper
        self._copied = torch.cuda.Event() if torch.device(device).type == "cuda" else None

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Plan a step; the arguments are those of the wrapper's `plan`."""
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(*args, **kwargs)
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


class Call(ABC):
    """One kind of attention call. Calls run one after another on the same CUDA stream, so they share a workspace."""

    @abstractmethod
    def __init__(self, library: Any, config: KernelConfig, workspace: Tensor) -> None:
        """library: the FlashInfer module."""

    @abstractmethod
    def prepare(self, segments: Sequence[Segment]) -> None:
        """Plan the attention of a step's segments."""

    @abstractmethod
    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """Return the attention of the segments' rows in one layer, [N, heads, head_dim].

        query [N, heads, head_dim], new key and value [N, kv_heads, head_dim]: only the segments' rows. cache: the
        layer's cache, which already contains the new keys and values.
        """


class PathCall(Call):
    """FA2 over paged keys, causal, for paths of any length."""

    def __init__(self, library: Any, config: KernelConfig, workspace: Tensor) -> None:
        self._wrapper = PlannedWrapper(
            library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2"), config.device
        )
        self._config = config

    def prepare(self, segments: Sequence[Segment]) -> None:
        """See `Call.prepare`."""
        plan_paged(self._wrapper, self._config, segments, [segment.keys for segment in segments], causal=True)

    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:  # noqa: ARG002  # from the cache
        """See `Call.run`."""
        return self._wrapper.run(query, cache, out=query.new_empty(query.shape))


class TreeCall(Call):
    """FA2 for trees: the context without a mask and the tree with a small one, merged by FlashInfer's kernel.

    Attention over all keys is the mean of the attention over each part, weighted by the parts' sums of exponentials
    (Milakov and Gimelshein, 2018). Masks therefore do not grow with the context.
    """

    def __init__(self, library: Any, config: KernelConfig, workspace: Tensor) -> None:
        paged = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        ragged = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._contexts, self._trees = PlannedWrapper(paged, config.device), PlannedWrapper(ragged, config.device)
        self._merge = library.merge_state
        self._config = config

    def prepare(self, segments: Sequence[Segment]) -> None:
        """See `Call.prepare`."""
        config = self._config
        plan_paged(self._contexts, config, segments, [segment.context for segment in segments])
        rows = torch.from_numpy(layout.indptr([segment.length for segment in segments]))
        self._trees.plan(
            rows,
            rows,
            config.heads,
            config.kv_heads,
            config.head_dim,
            custom_mask=on_device(layout.flat_masks(segments), torch.device(config.device)),
            q_data_type=config.dtype,
            kv_data_type=config.dtype,
            disable_split_kv=True,  # a token might attend to no key of some part
        )

    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `Call.run`."""
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
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.page_size,
        q_data_type=config.dtype,
        kv_data_type=config.dtype,
        **options,
    )
