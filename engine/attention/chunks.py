"""Correct FlashInfer's FA2 plans for CUDA graphs, on the device, where true lengths are below the planned ones.

A plan lists chunks of keys, which run in parallel, and the offsets at which the merge reads their results, both for the
planned lengths. The kernel, however, writes results at offsets that follow from the lengths it reads at run time: row r
of a sequence of n chunks has its c-th result at r * n + c. If a true length has fewer chunks than planned, the merge
would combine results of different rows, so the lists are rebuilt from the true lengths.

See flashinfer 0.7.2: `PrefillPlanImpl` in scheduler.cuh, `BatchPrefillWithPagedKVCacheDevice` in prefill.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd.errors import UserError

FIELDS = 15
"""Length of a plan."""
TILES, REQUESTS, CHUNKS, MERGED, FIRSTS, CHUNK_SIZE, VALID = 0, 4, 6, 7, 8, 9, 12
"""Indices into a plan: the number of tiles (a block of queries by a chunk of keys), and byte offsets in the integer
workspace."""
MAX_PROCESSORS = 256
"""Upper bound of a GPU's number of multiprocessors; workspaces are a few MiB larger than needed."""


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
