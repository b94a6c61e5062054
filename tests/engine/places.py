"""Where FlashInfer runs in tests: the library on a GPU, its slow twin on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from tests.engine.flashinfer_twin import TWIN

PLACES = ["twin", pytest.param("library", marks=pytest.mark.gpu)]


@dataclass
class Place:
    """Where FlashInfer, or its twin, runs."""

    device: str
    dtype: torch.dtype
    tolerance: float
    """Absolute and relative, of attention."""


@contextmanager
def place_of(name: str) -> Iterator[Place]:
    """One of `PLACES`; the twin stands in for the library until the end."""
    if name == "library":
        pytest.importorskip("flashinfer")
        yield Place("cuda", torch.bfloat16, 2e-2)
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in ("engine.attention.flashinfer", "engine.models.fused", "engine.attention.backend"):
            patch.setattr(f"{module}.flashinfer", lambda: TWIN)
        patch.setattr("engine.attention.backend._obstacle", lambda *_: None)
        patch.setattr("engine.attention.flashinfer.WORKSPACE_BYTES", 1)
        yield Place("cpu", torch.float32, 2e-5)
