"""Asynchronous transfers of small arrays between host and device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def staged(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array in memory that `device` can copy from asynchronously."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array on `device`, of the same shape and dtype; on a CPU it shares the array's memory.

    A copy from pageable memory would wait until the device has finished all earlier work.
    """
    tensor = staged(array, device)
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


class PendingArray:
    """An array that is being copied to the host."""

    def __init__(self, array: Tensor, copied: torch.cuda.Event | None) -> None:
        """array: in host memory. copied: event after which it is complete; None if it already is."""
        self._array = array
        self._copied = copied

    def read(self) -> np.ndarray:
        """Wait for the copy and return the array."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._array.numpy()


class CopyStream:
    """Copies results to the host while the device continues."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, tensor: Tensor) -> PendingArray:
        """Copy a tensor as it is now; later changes on the device do not affect the copy."""
        now = tensor.clone()
        if self._stream is None:
            return PendingArray(now, None)
        array = torch.empty(now.shape, dtype=now.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(now.device))
        with torch.cuda.stream(self._stream):
            array.copy_(now, non_blocking=True)
        now.record_stream(self._stream)
        return PendingArray(array, self._stream.record_event())
