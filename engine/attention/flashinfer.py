"""Attention on FlashInfer's kernels, for GPUs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Attention, StepShape
from engine.attention.cache import PagedCache
from engine.attention.calls import WORKSPACE_BYTES, CacheWriter, Call, KernelConfig, PathCall, TreeCall
from engine.attention.chunks import workspaces
from engine.attention.flashinfer_fixed import FlashInferFixed, requests_of
from engine.attention.layout import rows_of, segments_of
from engine.executor.batch import Batch
from engine.executor.optional import flashinfer
from engine.executor.transfer import on_device
from engine.models.config import ModelConfig
from engine.models.self_attention import Attend


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
        self._calls: dict[type[Call], Call] = {}
        self._writer = CacheWriter(self._library, self._cache)

    def begin(self, batch: Batch) -> Attend:
        """See `Attention.begin`."""
        device = torch.device(self._config.device)
        store = self._writer.at(on_device(batch.slots.astype(np.int32), device))
        prepared: list[tuple[slice | Tensor, Call]] = []
        # One call handles all paths, so that a step with prompts is planned once.
        all_segments = segments_of(batch)
        for kind, is_tree in ((PathCall, False), (TreeCall, True)):
            segments = [segment for segment in all_segments if (segment.mask is not None) == is_tree]
            if not segments:
                continue
            call = self._call(kind)
            call.prepare(segments)
            rows = rows_of(segments)
            prepared.append((rows if isinstance(rows, slice) else on_device(rows, device), call))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self._cache.layers[layer]
            store(cache, key, value)
            if len(prepared) == 1:
                return prepared[0][1].run(query, key, value, cache)
            attended = query.new_empty(query.shape)
            for rows, call in prepared:
                attended[rows] = call.run(query[rows], key[rows], value[rows], cache)
            return attended

        return attend

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

    def _call(self, kind: type[Call]) -> Call:
        """Return the call of a kind; created on first use, because each call allocates memory."""
        if kind not in self._calls:
            self._calls[kind] = kind(self._library, self._config, self._workspace)
        return self._calls[kind]
