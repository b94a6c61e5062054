"""Messages from rank 0 to the other ranks; a step is one message."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.backend import Backend
from engine.executor.batch import Batch
from engine.models.division import Shard


class RankSettings(NamedTuple):
    """What a rank needs to load its part of a model."""

    folder: Path
    shard: Shard
    dtype: torch.dtype
    device: str
    threads: int
    """Number of CPU threads."""


class Joining(NamedTuple):
    """Join the group; all ranks have loaded their parts."""

    store: Path


class Cache(NamedTuple):
    """Allocate a KV cache in place of the one before."""

    backend: Backend
    pages: int
    page_size: int


class Step(NamedTuple):
    """Run the forward pass of a batch."""

    batch: Batch
    layers: tuple[int, ...]
    """As in `Decoder.hidden_states`."""


class Move(NamedTuple):
    """Copy keys and values between slots, see `Attention.move`."""

    sources: np.ndarray
    targets: np.ndarray


class Stop(NamedTuple):
    """End the process."""


Message = Joining | Cache | Step | Move | Stop


class Loaded(NamedTuple):
    """Answer of a rank that has loaded its part."""


class LoadFailed(NamedTuple):
    """Answer of a rank that cannot load its part."""

    reason: str
