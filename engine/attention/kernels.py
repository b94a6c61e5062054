"""Which of FlashInfer's kernels attends for what: the only place that decides it, so that measuring can change it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.attention.layout import Piece

Kind = Literal["prefill", "decode", "merge", "padded", "mask", "xqa"]
"""`prefill`: FA2, planned, causal, any lengths. `decode`: planned, single tokens. `merge`: FA2 over the context without
a mask, FA2 over the draft with one, merged. `padded`: the same with the draft's part in PyTorch. `mask`: FA2 with a
mask over everything. `xqa`: no plan, a mask among the newest tokens."""

MOST_VERIFIED = 64
"""Longer pieces are parts of prompts, which XQA is not made for."""


@dataclass(frozen=True)
class Kernels:
    """A choice of kernels."""

    paths: Literal["prefill", "xqa"] = "prefill"
    """For single tokens and drafts without branches. FA2 is right for every length in one call together with prompts,
    and on GPUs of every generation; XQA needs no plan but runs on Hopper or later alone, and apart from prompts."""
    trees: Literal["merge", "padded", "mask", "xqa"] = "merge"
    """A mask over everything is built and read anew for each step, in bits times keys. Merging costs two small kernels
    a layer more, whatever the context."""
    singles_apart: bool = False
    """Whether single tokens attend in a call of their own beside longer pieces, or in one with those. One call plans
    once; two choose their tiles by their own lengths."""


def assign(pieces: Sequence[Piece], kernels: Kernels) -> dict[Kind, list[Piece]]:
    """The pieces of each call of a step, in the batch's order."""
    calls: dict[Kind, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.sees is not None:
            calls[kernels.trees].append(piece)
        elif kernels.paths == "xqa" and piece.length <= MOST_VERIFIED:
            calls["xqa"].append(piece)
        elif kernels.singles_apart and piece.length == 1:
            calls["decode"].append(piece)
        else:
            calls["prefill"].append(piece)
    if all(piece.length == 1 for piece in calls["prefill"]):
        calls["decode"] += calls.pop("prefill")
        calls["decode"].sort(key=lambda piece: piece.start)
    return {kind: members for kind, members in calls.items() if members}


def wants_tensor_cores(sharing: int) -> bool:
    """Whether decoding runs on tensor cores, for so many query heads to a key head.

    Below 4 the plain kernel reads keys as fast as memory gives them; from 4 on its arithmetic is in the way
    (FlashInfer's and SGLang's rule). The plain kernel exists only for some group sizes, 1 and 2 among them.
    """
    return sharing > 2
