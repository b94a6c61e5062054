"""Implementations of FlashInfer that tests run: the library on a GPU, its slow twin on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from tests.engine.flashinfer_twin import TWIN

LIBRARIES = ["twin", pytest.param("library", marks=pytest.mark.gpu)]


@dataclass
class Library:
    """Device and dtype on which FlashInfer or its twin runs."""

    device: str
    dtype: torch.dtype
    tolerance: float
    """Absolute and relative tolerance of attention."""


@contextmanager
def library_of(name: str) -> Iterator[Library]:
    """Yield one of `LIBRARIES`; the twin replaces the library until the context ends."""
    if name == "library":
        pytest.importorskip("flashinfer")
        yield Library("cuda", torch.bfloat16, 2e-2)
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in ("engine.attention.flashinfer", "engine.attention.backend"):
            patch.setattr(f"{module}.flashinfer", lambda: TWIN)
        patch.setattr("engine.attention.backend._obstacle", lambda *_: None)
        patch.setattr("engine.attention.flashinfer.WORKSPACE_BYTES", 1)
        yield Library("cpu", torch.float32, 2e-5)
