"""Attention put together from parts of the keys, and the part of a draft tree's own tokens. Runs on any device.

The softmax over all keys is a mean of the softmaxes over parts of them, weighted by the sum of exponentials of each
(Milakov and Gimelshein, 2018; cascade inference in FlashInfer). So the context of a tree needs no mask, and the mask
among the tree's own tokens does not grow with the context. Logarithms here are to base 2, as in FlashInfer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.layout import Piece, among_themselves


class Partial(NamedTuple):
    """Attention of N queries over some of their keys."""

    attended: Tensor
    """[N, heads, head_dim]; anything finite where there were no keys."""
    weight: Tensor
    """float32 [N, heads]: log2 of the sum of exp(score) over the keys, -inf without keys."""


def merge(left: Partial, right: Partial) -> Partial:
    """Attention over the keys of both, of which no query may lack all."""
    most = torch.maximum(left.weight, right.weight)
    shares = torch.exp2(left.weight - most), torch.exp2(right.weight - most)
    total = shares[0] + shares[1]
    attended = sum(
        part.attended.float() * (share / total).unsqueeze(-1) for part, share in zip((left, right), shares, strict=True)
    )
    assert isinstance(attended, Tensor)
    return Partial(attended.to(left.attended.dtype), most + torch.log2(total))


class Trees(NamedTuple):
    """T pieces, padded to the widest one's W tokens."""

    rows: Tensor
    """int64 [T * W]: rows among the pieces' own; padding repeats a piece's last one."""
    places: Tensor
    """int64 [N]: where each row is among the padded ones."""
    sees: Tensor
    """bool [T, W, W]."""


def padded(pieces: Sequence[Piece], device: str) -> Trees:
    """What `among_drafts` needs of some pieces; rows count from the first piece on, without gaps."""
    lengths = np.array([piece.length for piece in pieces])
    width = int(lengths.max())
    starts = np.cumsum(lengths) - lengths
    within = np.minimum(np.arange(width), lengths[:, None] - 1)
    sees = np.zeros((len(pieces), width, width), bool)
    for mask, piece in zip(sees, pieces, strict=True):
        mask[: piece.length, : piece.length] = among_themselves(piece)
        mask[piece.length :, 0] = True  # padding sees something, so that it is a number
    rows = (starts[:, None] + within).ravel()
    places = np.flatnonzero(np.arange(width) < lengths[:, None])
    return Trees(*(torch.from_numpy(array).to(device) for array in (rows, places, sees)))


def among_drafts(query: Tensor, key: Tensor, value: Tensor, trees: Trees) -> Partial:
    """Attention of the tokens of trees to one another.

    query [N, heads, head_dim], key and value [N, kv_heads, head_dim]: of the trees' tokens, one after another.
    """
    count, width, _ = trees.sees.shape
    kv_heads, head_dim = key.shape[1:]
    sharing = query.shape[1] // kv_heads
    queries = query[trees.rows].view(count, width, kv_heads, sharing, head_dim).float()
    keys, values = (tensor[trees.rows].view(count, width, kv_heads, head_dim).float() for tensor in (key, value))
    scores = torch.einsum("tqhgd,tkhd->thgqk", queries, keys) * (math.log2(math.e) / math.sqrt(head_dim))
    scores = scores.masked_fill(~trees.sees[:, None, None], float("-inf"))
    most = scores.amax(dim=-1, keepdim=True)
    parts = torch.exp2(scores - most)
    total = parts.sum(dim=-1, keepdim=True)
    attended = torch.einsum("thgqk,tkhd->tqhgd", parts / total, values)
    weight = (most + torch.log2(total)).squeeze(-1).permute(0, 3, 1, 2)
    return Partial(
        attended.reshape(count * width, -1, head_dim)[trees.places].to(query.dtype),
        weight.reshape(count * width, -1)[trees.places],
    )
