"""Small arrays between the host and the device, without waiting for more than they need."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on `device`, of the same shape and dtype; on the CPU it shares its memory.

    From ordinary memory PyTorch would wait for the copy, and so for all that the device has still to do before it.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Arriving:
    """A tensor on its way to the host, as it is now, whatever is done with it on the device later."""

    def __init__(self, tensor: Tensor) -> None:
        """Starts the copy, behind what the device has to do before."""
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event() if tensor.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    @property
    def have_come(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._copied is None or self._copied.query()

    def read(self) -> np.ndarray:
        """Wait for it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.numpy()
