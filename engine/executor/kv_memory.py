"""Size of the KV cache: bytes of a page, number of pages, and memory where the user chose none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.models.config import ModelConfig
from ssd.errors import UserError

LEAST_MIB = 256
"""Smallest default size of a cache, in MiB."""
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Folder, limit, usage and evictable usage of a container's memory, in the two versions of Linux's interface."""


def page_bytes(shapes: Sequence[ModelConfig], config: EngineConfig, dtype: torch.dtype, state_bytes: int) -> int:
    """Return the bytes of a page of all layers.

    shapes: the target, and the drafter's layers if it has any. dtype: dtype of the cache. state_bytes: size of what the
    drafter stores for each slot besides keys and values.
    """
    values = sum(shape.num_layers * shape.cache_size for shape in shapes)
    return (values * dtype.itemsize + state_bytes) * config.page_size


def default_kv_memory(size: int, config: EngineConfig, max_positions: int, available: int) -> int:
    """Return the MiB of a cache for one full context window, at least `LEAST_MIB`, at most half of what is available.

    size: bytes of a page. max_positions: the model's context window. available: bytes that are free.
    """
    window = -(-max_positions // config.page_size) * size
    return max(1, min(max(LEAST_MIB, -(-window >> 20)), available >> 21))


def page_count(size: int, config: EngineConfig, max_positions: int) -> int:
    """Return the number of pages that fit into the configured memory, at most one full context per sequence.

    size: bytes of a page. max_positions: the model's context window. Raises UserError if no page fits.
    """
    assert config.kv_memory_mib is not None
    granted = (config.kv_memory_mib << 20) // size
    if granted == 0:
        least = -(-size >> 20)
        raise UserError(
            f"--kv-memory {config.kv_memory_mib}: a page of this model's KV cache takes {least} MiB; give more"
        )
    return min(granted, config.max_sequences * -(-max_positions // config.page_size))


def available_memory(device: torch.device) -> int:
    """Return the bytes of memory that are free on a device; on a CPU within the limit of the container, if any."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):
        return 4 * LEAST_MIB << 20  # Not Linux: what other programs leave is not known.
    return min([free, *(room for cgroup in CGROUPS if (room := _room(*cgroup)) is not None)])


def _room(folder: Path, limit: str, usage: str, evictable: str) -> int | None:
    """Return the bytes that a container may still allocate; None without a limit."""
    try:
        most, used = (int((folder / name).read_text()) for name in (limit, usage))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, most - used + int(stat.get(evictable, 0)))
