"""Small arrays from the host to the device, without waiting for it."""

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
