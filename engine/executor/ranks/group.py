"""The exchange of tensors between ranks."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine.models.division import Shard

TIMEOUT_S = 60.0
"""Longest time that a rank waits for another one within a step; far above the time of a step."""


class RankGroup:
    """Collective operations of `torch.distributed`: NCCL between GPUs, gloo between processes on a CPU.

    A process can belong to one group at a time.
    """

    def __init__(self, shard: Shard, store: Path, device: str) -> None:
        """Wait until all ranks have joined. store: a file that they share, so that no port has to be agreed on.

        Raises RuntimeError if a rank does not join within `TIMEOUT_S`.
        """
        self.shard = shard
        if sys.platform == "linux":
            # All ranks are on one machine, whose host name need not have an address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._is_cuda = torch.device(device).type == "cuda"
        dist.init_process_group(
            "nccl" if self._is_cuda else "gloo",
            init_method=store.absolute().as_uri(),
            rank=shard.rank,
            world_size=shard.count,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        dist.barrier()  # Until here ranks may still read the file.

    def sum(self, tensor: Tensor) -> Tensor:
        """See `engine.models.sharding.Group`."""
        if self._is_cuda or self.shard.count == 2:
            dist.all_reduce(tensor)
            return tensor
        # gloo's all-reduce of more ranks adds each part of a tensor in another order.
        parts = [torch.empty_like(tensor) for _ in range(self.shard.count)]
        dist.all_gather(parts, tensor.contiguous())
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See `engine.models.sharding.Group`."""
        is_first = self.shard.rank == 0
        parts = [torch.empty_like(tensor) for _ in range(self.shard.count)] if is_first else []
        dist.gather(tensor.contiguous(), parts or None)
        return parts

    def close(self) -> None:
        """Leave the group. Ranks that wait for this one get a RuntimeError."""
        dist.destroy_process_group()
