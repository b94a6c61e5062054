"""Keys and values in pages, in the layout that FlashInfer calls NHD."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.models.config import ModelConfig


class PagedCache:
    """Keys and values of all layers in one tensor, [layers, pages, 2, page_size, kv_heads, head_dim].

    A page holds keys first, then values. A slot is page * page_size + offset.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        shape = (config.num_layers, pages, 2, page_size, config.num_kv_heads, config.head_dim)
        self.layers = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.layers.shape[1]

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy keys and values between slots; see `Attention.move`."""
        from_pages, from_offsets = self._pages_and_offsets(sources)
        to_pages, to_offsets = self._pages_and_offsets(targets)
        self.layers[:, to_pages, :, to_offsets] = self.layers[:, from_pages, :, from_offsets]

    def _pages_and_offsets(self, slots: np.ndarray) -> tuple[Tensor, Tensor]:
        on_device = torch.from_numpy(slots).to(self.layers.device)
        return on_device // self.page_size, on_device % self.page_size
