"""Correct the chunks that FlashInfer's FA2 planned in a CUDA graph, on the device, for shorter lengths.

A plan lists chunks of the keys of all sequences, which run in parallel, and where the merge finds their results. It is
made for the planned lengths. But the kernel places its results by the lengths that it reads when it runs: row r of a
sequence of n chunks has its c-th result at r * n + c. So where a true length has fewer chunks than its bound, results
of different rows would be merged unless the lists are rebuilt from the true lengths.

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
"""Indices into a plan: the number of tiles (queries by a chunk of keys), and offsets in the integer workspace."""
MAX_PROCESSORS = 256
"""An upper bound of the number of a GPU's processors. It makes workspaces a few MiB too large."""


class Chunks:
    """The arrays of a plan for R requests of N rows together, as views of the integer workspace that holds them."""

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
        """Rebuild the lists for lengths, int32 [R], of at most those planned, and at least 1 where there are rows.

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
    """Return upper bounds of the bytes that a plan in graph mode needs in the workspaces for floats and integers.

    A plan reserves a result for each of its tiles, whatever the lengths: as many tiles as fill the device twice, or as
    the queries need.
    """
    sharing = heads // kv_heads
    # Largest number of rows of a request.
    queries = max(0, rows - requests + 1) * sharing
    tile = 16 if queries <= 16 else 128 if queries > 64 and head_dim < 256 else 64
    tiles = max(2 * processors // kv_heads, -(-rows * sharing // tile) + requests - 1)
    results = -(-tiles * tile // sharing)
    return heads * results * (head_dim + 1) * 4 + 64, 16 * tiles + 4 * (requests + rows) + 256
