"""Load a model in parts, one per rank, and connect them."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.executor.ranks.leader import Ranks, RankSettings
from engine.executor.ranks.worker import run_rank
from engine.models.loader import load_config, refuse_unsupported
from engine.models.packed import pack
from engine.models.sharding import Shard, ShardedDecoder, check_division, load_shard
from ssd.errors import UserError


def check_ranks(folder: Path, count: int, dtype: torch.dtype, device: str) -> None:
    """Raise UserError unless the model in `folder` can run in `dtype`, divided over `count` devices like `device`.

    Reads no weights.
    """
    wanted = torch.device(device)
    if wanted.type == "cuda":
        if wanted.index is not None:
            raise UserError(
                f"--tensor-parallel {count} uses the first {count} GPUs; give --device cuda, not {device}, and choose "
                "GPUs with CUDA_VISIBLE_DEVICES"
            )
        if count > (gpus := torch.cuda.device_count()):
            raise UserError(f"--tensor-parallel {count} needs {count} GPUs, but there are {gpus}")
    config = load_config(folder)
    refuse_unsupported(config, dtype, device)
    check_division(config, count)


def load_ranks(folder: Path, count: int, *, dtype: torch.dtype, device: str, threads: int) -> ShardedDecoder:
    """Return rank 0's part of a model; its `group` is a `Ranks`, which has started the other ranks.

    Weights are packed on a CPU. threads: number of CPU threads of each other rank. Raises UserError like `check_ranks`
    and `load_shard`.
    """
    check_ranks(folder, count, dtype, device)
    settings = [
        RankSettings(folder, Shard(rank, count), dtype, _device(device, rank), threads) for rank in range(count)
    ]
    ranks = Ranks(settings[1:], run_rank)
    try:
        model = load_shard(folder, settings[0].shard, dtype=dtype, device=settings[0].device)
        pack(model)
        ranks.join(settings[0].device)
    except BaseException:
        ranks.close()
        raise
    model.connect(load_config(folder), ranks)
    return model


def _device(device: str, rank: int) -> str:
    return f"cuda:{rank}" if torch.device(device).type == "cuda" else device
