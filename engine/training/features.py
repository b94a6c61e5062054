"""The target's hidden states of the training text, computed once and read by every training run.

Text is divided into windows of equal length. Windows are stored in shards, one file each, which are mapped into memory;
an interrupted computation continues with the first shard that is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.training.attention import WindowAttention

MANIFEST_FILE = "features.json"
SHARD_WINDOWS = 128
"""Windows in a shard: 160 MiB for windows of 512 tokens and four layers of 320."""
BATCH_TOKENS = 4096
"""Tokens in one forward pass of the target."""
BYTES_PER_VALUE = 2


class Windows(NamedTuple):
    """A batch of B windows of T tokens."""

    tokens: Tensor
    """int64 [B, T]."""
    states: Tensor
    """float32 [B, T, L, H]: the target's hidden states after the selected layers."""


@dataclass(frozen=True)
class Features:
    """Windows of text with the target's hidden states, in a folder."""

    folder: Path
    layers: tuple[int, ...]
    """Layers of the target, as in `Decoder.hidden_states`."""
    tokens: np.ndarray
    """uint32 [W, T], in a random order."""
    hidden_size: int
    fingerprint: str
    """Identifies the target and the text."""

    @classmethod
    def open(cls, work: Path, target: Decoder, layers: tuple[int, ...], tokens: np.ndarray, count: int) -> Features:
        """Return the features of `count` or more of the windows uint32 [W, T], in a folder below `work`; see `missing`.

        An earlier folder for the same target and text that has at least these layers is reused.
        """
        fingerprint = fingerprint_of(target, tokens)
        for path in sorted(work.glob(f"*/{MANIFEST_FILE}")):
            manifest = json.loads(path.read_text())
            if manifest["fingerprint"] == fingerprint and {*layers} <= {*manifest["layers"]}:
                layers = tuple(manifest["layers"])
        folder = work / "-".join(("features", fingerprint[:8], *map(str, layers)))
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {"fingerprint": fingerprint, "layers": layers}
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest) + "\n")
        whole_shards = -(-count // SHARD_WINDOWS) * SHARD_WINDOWS
        return cls(folder, layers, tokens[:whole_shards], target.config.hidden_size, fingerprint)

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return self.tokens.size * len(self.layers) * self.hidden_size * BYTES_PER_VALUE

    @property
    def missing_size(self) -> int:
        """Bytes of the shards that are not computed yet, at most."""
        return min(self.size, len(self.missing()) * SHARD_WINDOWS * self.size // len(self.tokens))

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-len(self.tokens) // SHARD_WINDOWS)

    def missing(self) -> list[int]:
        """Return the shards that are not computed yet, ascending."""
        return [shard for shard in range(self.shards) if not self._path(shard).exists()]

    def compute(self, target: Decoder) -> Iterator[int]:
        """Compute the missing shards, and yield the number of tokens done after each batch."""
        missing = self.missing()
        done = len(self.tokens) - sum(len(self._window_range(shard)) for shard in missing)
        for shard in missing:
            rows = []
            for batch in np.array_split(self.tokens[self._window_range(shard)], self._batches(shard)):
                rows.append(_as_stored(window_states(target, torch.from_numpy(batch.astype(np.int64)), self.layers)))
                done += len(batch)
                yield done * self.tokens.shape[1]
            partial = self._path(shard).with_suffix(".partial")
            with partial.open("wb") as file:
                np.save(file, np.concatenate(rows))
            partial.rename(self._path(shard))

    def windows(self, indices: np.ndarray, layers: tuple[int, ...]) -> Windows:
        """Return windows by number, int [B], with the states after `layers`, a part of those stored."""
        columns = [self.layers.index(layer) for layer in layers]
        states = np.stack([self._shard(int(i) // SHARD_WINDOWS)[int(i) % SHARD_WINDOWS][:, columns] for i in indices])
        stored = torch.from_numpy(states.view(np.int16)).view(torch.bfloat16)
        return Windows(torch.from_numpy(self.tokens[indices].astype(np.int64)), stored.float())

    def _shard(self, shard: int) -> np.ndarray:
        if shard not in self._open:
            self._open[shard] = np.load(self._path(shard), mmap_mode="r")
        return self._open[shard]

    @cached_property
    def _open(self) -> dict[int, np.ndarray]:
        return {}

    def _path(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05d}.npy"

    def _window_range(self, shard: int) -> np.ndarray:
        return np.arange(len(self.tokens))[shard * SHARD_WINDOWS : (shard + 1) * SHARD_WINDOWS]

    def _batches(self, shard: int) -> int:
        windows = len(self._window_range(shard))
        return -(-windows // max(1, BATCH_TOKENS // self.tokens.shape[1]))


def window_states(target: Decoder, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Return the target's hidden states for windows int64 [B, T], each without context: [B, T, L, H]."""
    rows, length = tokens.shape
    attend = WindowAttention(rows, length).attend
    with torch.inference_mode():
        states = target.hidden_states(tokens.flatten(), torch.arange(length).repeat(rows), attend, layers=layers)[1]
    return states.view(rows, length, *states.shape[1:])


def fingerprint_of(target: Decoder, tokens: np.ndarray) -> str:
    """Return a hash of a target and of tokens of any shape."""
    digest = hashlib.sha256(repr(target.config).encode())
    for name, weight in target.named_parameters():
        if weight.ndim == 1:  # all norms: no two trained models have the same
            digest.update(name.encode() + weight.detach().float().cpu().numpy().tobytes())
    digest.update(repr(tokens.shape).encode())
    digest.update(np.ascontiguousarray(tokens).tobytes())
    return digest.hexdigest()


def _as_stored(states: Tensor) -> np.ndarray:
    return states.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
