"""Large buffers of uint32 that cost memory only where they were written, and can give it back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np


class Buffer:
    """`size` uint32 in anonymous memory, all zero, on huge pages where the system has them."""

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
        """Give the memory back to the system; the contents become zero. Nobody may be reading."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Give memory that was freed in small pieces back to the system, where the C library can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
