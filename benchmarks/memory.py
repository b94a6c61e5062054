"""Memory that a benchmark used and that is available: of the process, or of the GPU if it uses one."""

from __future__ import annotations

import gc

import torch

from benchmarks import index

SPARE = 0.1
"""GPU memory for activations, captured graphs and workspaces of libraries."""


def forget_peak() -> None:
    """Reset the peak."""
    index.forget_peak()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Return the peak memory since `forget_peak`: of the GPU if this process uses one, else of the process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else index.peak_bytes()


def free_bytes(device: str) -> int | None:
    """Return the memory available to a KV cache on a GPU; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return max(1 << 20, free - int(SPARE * total))


def device_name(device: str) -> str:
    """Return the name of the memory for reports."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device
