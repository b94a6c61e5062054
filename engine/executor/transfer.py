"""Small arrays between the host and the device, without waiting for more than they need."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def staged(array: np.ndarray, device: torch.device) -> Tensor:
    """The array in memory from which `device` copies without the host waiting."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on `device`, of the same shape and dtype; on the CPU it shares its memory.

    From ordinary memory PyTorch would wait for the copy, and so for all that the device has still to do before it.
    """
    return staged(array, device).to(device, non_blocking=True)


class Arriving:
    """An array on its way to the host."""

    def __init__(self, array: Tensor, copied: torch.cuda.Event | None) -> None:
        """An array in host memory, and what has happened once it is filled; None if it is."""
        self._array = array
        self._copied = copied

    @property
    def has_come(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._copied is None or self._copied.query()

    def read(self) -> np.ndarray:
        """Wait for it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._array.numpy()


class CopyStream:
    """Brings results to the host while the device goes on."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bring(self, tensor: Tensor) -> Arriving:
        """A tensor as it is now, whatever is done with it on the device later."""
        now = tensor.clone()
        if self._stream is None:
            return Arriving(now, None)
        array = torch.empty(now.shape, dtype=now.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(now.device))
        with torch.cuda.stream(self._stream):
            array.copy_(now, non_blocking=True)
        now.record_stream(self._stream)
        return Arriving(array, self._stream.record_event())
