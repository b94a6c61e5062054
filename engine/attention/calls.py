"""Calls of FlashInfer's attention kernels: each is prepared once a step, and then run in every layer.

`prepare` gets arrays on the CPU: a plan made from arrays on the device would wait for all that runs there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention import layout
from engine.attention.kernels import Kind, wants_tensor_cores
from engine.attention.layout import Piece
from engine.attention.merge import Partial, among_drafts, merge, padded
from engine.attention.planned import Planned
from engine.executor.transfer import on_device

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for the parts of split keys. Plans of ragged steps split only until they fill the device,
so they need less, whatever the batch; for those of fixed shapes see `chunks.workspaces`."""
XQA_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Shape:
    """What does not change from step to step."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: str


class Call(ABC):
    """One kind of call."""

    @abstractmethod
    def prepare(self, pieces: Sequence[Piece]) -> None:
        """What a step needs to know of its pieces."""

    @abstractmethod
    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """Attention of the pieces' rows in one layer, [N, heads, head_dim].

        query, and the new key and value [N, kv_heads, head_dim]: of those rows alone. cache: the layer's, with the
        new keys and values in it.
        """


class Prefill(Call):
    """FA2 over paged keys, with pieces of any lengths."""

    def __init__(self, library: Any, shape: Shape, workspace: Tensor, *, masks: bool = False) -> None:
        """masks: give it one over all keys, as trees need; otherwise it is causal."""
        self._wrapper = Planned(
            library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2"), shape.device
        )
        self._shape = shape
        self._masks = masks

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """See `Call.prepare`."""
        lengths = [piece.keys for piece in pieces]
        if self._masks:
            mask = on_device(layout.flat_mask(pieces, with_context=True), torch.device(self._shape.device))
            plan_paged(self._wrapper, self._shape, pieces, lengths, custom_mask=mask)
        else:
            plan_paged(self._wrapper, self._shape, pieces, lengths, causal=True)

    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:  # noqa: ARG002  # from the cache
        """See `Call.run`."""
        return self._wrapper.run(query, cache, out=query.new_empty(query.shape))


class Decode(Call):
    """Single tokens."""

    def __init__(self, library: Any, shape: Shape, workspace: Tensor) -> None:
        use_tensor_cores = wants_tensor_cores(shape.heads // shape.kv_heads)
        self._wrapper = Planned(
            library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=use_tensor_cores, backend="fa2"
            ),
            shape.device,
        )
        self._shape = shape

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """See `Call.prepare`."""
        shape = self._shape
        keys = layout.paged_keys([piece.pages for piece in pieces], [piece.keys for piece in pieces], shape.page_size)
        self._wrapper.plan(
            torch.from_numpy(keys.indptr),
            on_device(keys.indices, torch.device(shape.device)),
            torch.from_numpy(keys.last_page_len),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )

    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:  # noqa: ARG002  # from the cache
        """See `Call.run`."""
        return self._wrapper.run(query, cache, out=query.new_empty(query.shape))


class Merge(Call):
    """Trees: the context without a mask and the draft with a small one, by FA2, merged by FlashInfer's kernel."""

    def __init__(self, library: Any, shape: Shape, workspace: Tensor) -> None:
        paged = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        ragged = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._context, self._drafts = Planned(paged, shape.device), Planned(ragged, shape.device)
        self._merge = library.merge_state
        self._shape = shape

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """See `Call.prepare`."""
        shape = self._shape
        plan_paged(self._context, shape, pieces, [piece.context for piece in pieces])
        rows = torch.from_numpy(layout.indptr([piece.length for piece in pieces]))
        self._drafts.plan(
            rows,
            rows,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            custom_mask=on_device(layout.flat_mask(pieces, with_context=False), torch.device(shape.device)),
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            disable_split_kv=True,  # a part of the keys might hold nothing that some token sees
        )

    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `Call.run`."""
        context = self._context.run(query, cache, return_lse=True)
        drafts = self._drafts.run(query, key, value, return_lse=True)
        attended: Tensor = self._merge(*context, *drafts)[0]
        return attended


class Padded(Call):
    """Trees: the same with the draft's part and the merge in PyTorch, many small kernels."""

    def __init__(self, library: Any, shape: Shape, workspace: Tensor) -> None:
        paged = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._context = Planned(paged, shape.device)
        self._shape = shape

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """See `Call.prepare`."""
        plan_paged(self._context, self._shape, pieces, [piece.context for piece in pieces])
        self._trees = padded(pieces, self._shape.device)

    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `Call.run`."""
        context = Partial(*self._context.run(query, cache, return_lse=True))
        return merge(context, among_drafts(query, key, value, self._trees)).attended


class Xqa(Call):
    """XQA: tables and lengths are read on the device, so there is no plan."""

    def __init__(self, library: Any, shape: Shape) -> None:
        self._attend = library.decode.xqa_batch_decode_with_kv_cache
        self._shape = shape
        # Its first part holds semaphores that have to be 0 at first, so it is shared with no other kernel.
        self._workspace = torch.zeros(XQA_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """See `Call.prepare`."""
        tables, lengths = [piece.pages for piece in pieces], [piece.keys for piece in pieces]
        self._tables = self._on_device(layout.block_tables(tables, lengths, self._shape.page_size))
        self._lengths = self._on_device(np.array(lengths, np.int32))
        self._most_keys = max(lengths)
        # Each has a module of its own to be compiled, so there are few.
        most = int(max(piece.length for piece in pieces))
        self._settings: dict[str, Any] = {"q_len_per_req": 1 << (most - 1).bit_length()}
        if self._settings["q_len_per_req"] > 1:
            self._settings["mask"] = self._on_device(layout.packed_rows(pieces))
            self._settings["q_cu_seq_lens"] = self._on_device(layout.indptr([piece.length for piece in pieces]))

    def run(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:  # noqa: ARG002  # from the cache
        """See `Call.run`."""
        scale = 1 / math.sqrt(self._shape.head_dim)
        query = query.contiguous()
        attended: Tensor = self._attend(
            query,
            cache,
            self._workspace,
            self._tables,
            self._lengths,
            self._most_keys,
            bmm1_scale=scale,
            bmm2_scale=1.0,
            **self._settings,
        )
        return attended.view_as(query)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return on_device(array, torch.device(self._shape.device))


def plan_paged(wrapper: Planned, shape: Shape, pieces: Sequence[Piece], lengths: Sequence[int], **how: Any) -> None:
    """Plan pieces over the first `lengths` keys of their sequences; `how`: the rest of what FlashInfer's plan takes."""
    indptr, indices, last = layout.paged_keys([piece.pages for piece in pieces], lengths, shape.page_size)
    wrapper.plan(
        torch.from_numpy(layout.indptr([piece.length for piece in pieces])),
        torch.from_numpy(indptr),
        # Alone of these arrays it is large, and not read on the CPU.
        on_device(indices, torch.device(shape.device)),
        torch.from_numpy(last),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.page_size,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
        **how,
    )


def make_call(kind: Kind, library: Any, shape: Shape, workspace: Tensor) -> Call:
    """The call of a kind. Those of a device's stream run one after another, so they share a workspace."""
    if kind == "xqa":
        return Xqa(library, shape)
    if kind == "decode":
        return Decode(library, shape, workspace)
    if kind == "merge":
        return Merge(library, shape, workspace)
    if kind == "padded":
        return Padded(library, shape, workspace)
    return Prefill(library, shape, workspace, masks=kind == "mask")
