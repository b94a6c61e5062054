"""What memory a benchmark used and what is left: of the process, or of the GPU where it runs on one."""

from __future__ import annotations

import gc

import torch

from benchmarks import index

SPARE = 0.1
"""Of a GPU's memory, left for activations, captured graphs and the workspaces of libraries."""


def forget_peak() -> None:
    """Let the peak begin anew."""
    index.forget_peak()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """The most that was in use since `forget_peak`: on the GPU if this process uses one, else of the process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else index.peak_bytes()


def free_bytes(device: str) -> int | None:
    """What a KV cache may take there; None on a CPU, whose memory others share."""
    if not device.startswith("cuda"):
        return None
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return max(1 << 20, free - int(SPARE * total))


def device_name(device: str) -> str:
    """As a report names it."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device
