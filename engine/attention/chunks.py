"""How FlashInfer's FA2 cuts keys into chunks in a CUDA graph, and how the device corrects that for shorter lengths.

A plan lists the chunks of all sequences, which run side by side, and where the merge finds their results. It counts
the chunks of the lengths that it was given. The kernel, though, places what it computes by the lengths that it finds
when it runs: row r of a sequence of n chunks has its c-th result at r * n + c. So where a true length has fewer chunks
than its bound, results would be merged with those of other rows, unless the lists are made anew from the true lengths.

Read in flashinfer 0.7.2: `PrefillPlanImpl` in scheduler.cuh, `BatchPrefillWithPagedKVCacheDevice` in prefill.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd.errors import UserError

FIELDS = 15
"""Numbers in a plan."""
TILES, REQUESTS, CHUNKS, MERGED, FIRSTS, CHUNK_SIZE, VALID = 0, 4, 6, 7, 8, 9, 12
"""Of these the number of tiles, each of some queries by a chunk, and where arrays begin in the integer workspace."""
MOST_PROCESSORS = 256
"""More than any GPU has. Workspaces that are too large by that cost a few MiB."""


class Chunks:
    """The arrays of a plan for R requests of N rows together, as views of the integer workspace that holds them."""

    def __init__(self, integers: Tensor, plan: Sequence[int], requests: int, rows: int) -> None:
        """integers: the workspace, uint8. plan: what FlashInfer's planner returned.

        Raises UserError if that is not what we know.
        """
        if len(plan) != FIELDS:
            raise UserError(
                "FlashInfer plans in a way unknown here; install flashinfer-python 0.7.2, or give --attention plain"
            )

        def numbers(field: int, count: int) -> Tensor:
            return integers[plan[field] : plan[field] + 4 * count].view(torch.int32)

        tiles = plan[TILES]
        self._size = numbers(CHUNK_SIZE, 1)
        self._firsts = numbers(FIRSTS, requests + 1)
        self._merged = numbers(MERGED, rows + 1)
        self._valid = integers[plan[VALID] : plan[VALID] + tiles].view(torch.bool)
        # Behind what is valid stands anything.
        self._requests = numbers(REQUESTS, tiles)
        self._chunks = numbers(CHUNKS, tiles)

    def correct(self, lengths: Tensor, starts: Tensor) -> None:
        """Make the lists those of some lengths, int32 [R]: at most as planned, at least 1 where there are rows.

        starts: int32 [R + 1], each request's first row and the end of all.
        """
        counts = (lengths + self._size - 1) // self._size
        row = torch.arange(len(self._merged) - 1, device=starts.device, dtype=torch.int32)
        owner = torch.searchsorted(starts[1:], row, right=True)
        self._merged[1:] = counts[owner].cumsum(dim=0)
        self._firsts.copy_(self._merged[starts])
        self._valid &= self._chunks < counts[self._requests.clamp(0, len(counts) - 1).long()]


def workspaces(
    heads: int, kv_heads: int, head_dim: int, requests: int, rows: int, processors: int = MOST_PROCESSORS
) -> tuple[int, int]:
    """Bytes of the workspaces for floats and for integers that a plan in graph mode takes, at most.

    It reserves a result of each of its tiles, whatever the lengths: as many tiles as fill the device twice, or as the
    queries need.
    """
    sharing = heads // kv_heads
    # Of the longest request that there may be beside the others.
    queries = max(0, rows - requests + 1) * sharing
    tile = 16 if queries <= 16 else 128 if queries > 64 and head_dim < 256 else 64
    tiles = max(2 * processors // kv_heads, -(-rows * sharing // tile) + requests - 1)
    results = -(-tiles * tile // sharing)
    return heads * results * (head_dim + 1) * 4 + 64, 16 * tiles + 4 * (requests + rows) + 256
