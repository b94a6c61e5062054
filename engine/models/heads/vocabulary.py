"""Reduced draft vocabularies as checkpoints store them.

`d2t` is an offset: row i of the head's output projection belongs to the target's token i + d2t[i]. `t2d` marks these
tokens among all of the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.heads.source import HeadFolder
from ssd.errors import UserError


def read_draft_ids(source: HeadFolder, target: ModelConfig, size: int) -> Tensor | None:
    """Return the target's token of each row, int64 [draft vocabulary], or None if the checkpoint has no `d2t`.

    size: number of rows. Raises UserError unless `d2t` and `t2d` describe that number of different tokens of the
    target.
    """
    if "d2t" not in source.names:
        return None
    offsets = _integers(source, "d2t")
    if offsets.shape != (size,):
        raise UserError(f"d2t in {source.folder} has shape {tuple(offsets.shape)}, but needs {size} numbers; {_RETRY}")
    ids = torch.arange(len(offsets)) + offsets
    outside = ((ids < 0) | (ids >= target.vocab_size)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise UserError(
            f"d2t in {source.folder} maps row {row} to token {int(ids[row])}, but the target has tokens 0 to "
            f"{target.vocab_size - 1}; d2t must hold offsets from the row's number; give a head trained for this target"
        )
    if len(ids.unique()) < len(ids):
        raise UserError(f"d2t in {source.folder} maps several rows to one token; {_RETRY}")
    if "t2d" in source.names:
        _check_marks(source, ids, target.vocab_size)
    return ids


def draft_ids(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t`, int64 [draft vocabulary], and `t2d`, bool [vocab_size], for the target's tokens of all rows."""
    ids = ids.cpu()
    return {"d2t": ids - torch.arange(len(ids)), "t2d": _marks(ids, vocab_size)}


_RETRY = "download or copy it again"


def _check_marks(source: HeadFolder, ids: Tensor, vocab_size: int) -> None:
    marks = _integers(source, "t2d") != 0
    expected = _marks(ids, vocab_size)
    if marks.shape != expected.shape or not torch.equal(marks, expected):
        raise UserError(f"d2t and t2d in {source.folder} name different tokens; {_RETRY}")


def _marks(ids: Tensor, vocab_size: int) -> Tensor:
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[ids] = True
    return marks


def _integers(source: HeadFolder, name: str) -> Tensor:
    tensor = source.checkpoint.read(name)
    if tensor.is_floating_point() or tensor.is_complex():
        raise UserError(f"{name} in {source.folder} is stored as {tensor.dtype}, not as integers; {_RETRY}")
    return tensor.to(torch.int64)
