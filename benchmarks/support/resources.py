"""Processor time, and used and available memory: of the process, or of the GPU if it uses one.

PyTorch is imported only by the functions that need a device.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

SPARE = 0.1
"""Fraction of GPU memory that is left for activations, captured graphs and workspaces of libraries."""


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a running process, without its children."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes() -> int:
    """Return the resident memory of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def forget_peak() -> None:
    """Reset the peak."""
    Path("/proc/self/clear_refs").write_text("5")
    if _uses_gpu():
        sys.modules["torch"].cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Return the peak memory since `forget_peak`: of the GPU if this process uses one, else of the process."""
    if _uses_gpu():
        return sys.modules["torch"].cuda.max_memory_allocated()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def free_bytes(device: str) -> int | None:
    """Return the memory available to a KV cache on a GPU; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return max(1 << 20, free - int(SPARE * total))


def device_name(device: str) -> str:
    """Return the name of a device for reports."""
    if not device.startswith("cuda"):
        return device
    import torch

    return torch.cuda.get_device_name()


def _uses_gpu() -> bool:
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
