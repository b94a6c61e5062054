"""Large uint32 buffers that use memory only where they were written, and can release it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np


class Buffer:
    """Anonymous memory for `size` uint32, initially zero, on huge pages if the system supports them."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(1, size) * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Random reads of hundreds of megabytes miss the TLB on small pages.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(self._map, np.uint32, size)
        self.address: int = self.array.ctypes.data

    def __len__(self) -> int:
        return len(self.array)

    def release(self) -> None:
        """Return the memory to the system; the contents become zero. There must be no readers."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Return freed memory of small allocations to the system, if the C library can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
