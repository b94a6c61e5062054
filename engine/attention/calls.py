"""Calls of FlashInfer's attention kernels: each is prepared once a step, and then run in every layer.

`prepare` gets arrays on the CPU: a plan made from arrays on the device would wait for all that runs there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.attention import layout
from engine.attention.layout import Piece
from engine.attention.planned import Planned
from engine.executor.transfer import on_device

Kind = Literal["prefill", "decode", "merge"]
"""FA2 for pieces of any lengths, a kernel for single tokens, and one for trees."""
WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for the parts of split keys. Plans of ragged steps split only until they fill the device,
so they need less, whatever the batch; for those of fixed shapes see `chunks.workspaces`."""


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

    def __init__(self, library: Any, shape: Shape, workspace: Tensor) -> None:
        self._wrapper = Planned(
            library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2"), shape.device
        )
        self._shape = shape

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """See `Call.prepare`."""
        plan_paged(self._wrapper, self._shape, pieces, [piece.keys for piece in pieces], causal=True)

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
            custom_mask=on_device(layout.flat_mask(pieces), torch.device(shape.device)),
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
    calls: dict[Kind, Callable[[Any, Shape, Tensor], Call]] = {"prefill": Prefill, "decode": Decode, "merge": Merge}
    return calls[kind](library, shape, workspace)


def assign(pieces: Sequence[Piece]) -> dict[Kind, list[Piece]]:
    """The pieces of each call of a step, in the batch's order."""
    paths = [piece for piece in pieces if piece.sees is None]
    calls: dict[Kind, list[Piece]] = {
        "decode" if all(piece.length == 1 for piece in paths) else "prefill": paths,
        "merge": [piece for piece in pieces if piece.sees is not None],
    }
    return {kind: members for kind, members in calls.items() if members}


def wants_tensor_cores(sharing: int) -> bool:
    """Whether decoding runs on tensor cores, for so many query heads to a key head.

    Below 4 the plain kernel reads keys as fast as memory gives them; from 4 on its arithmetic is in the way
    (FlashInfer's and SGLang's rule). The plain kernel exists only for some group sizes, 1 and 2 among them.
    """
    return sharing > 2
