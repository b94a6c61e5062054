"""What the device verifies, and what comes of it: fixed shapes, whatever the drafts are."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Drafted(NamedTuple):
    """Rows of B sequences in flat arrays. A sequence that is to produce has a row for its last committed token, then
    one for each of its draft tokens; there is at least one row in all, be it padding.
    """

    tokens: Tensor
    """int64 [R]."""
    parents: Tensor | None
    """int32 [R]: of each draft token within its draft, -1 for a child of the context; parents stand before their
    children, and rows of committed tokens hold anything. None if all drafts are paths."""
    starts: Tensor
    """int32 [B]: each sequence's first row."""
    counts: Tensor
    """int32 [B]: its rows; 0 if it is not to produce."""
    scheduled: Tensor
    """int32 [B]: its committed tokens that this step runs; 0 for padding."""
    seats: Tensor
    """int64 [B]: where it sits in the state; only the idle seat may come more than once."""


class Verified(NamedTuple):
    """What B sequences produced, W = most draft tokens + 1."""

    tokens: Tensor
    """int32 [B, W]: the first `counts` of each row: accepted draft tokens and the target's own; 0 behind them."""
    rows: Tensor
    """int32 [B, W]: whose logits those tokens came from, counted from the sequence's first row; 0 behind them."""
    counts: Tensor
    """int32 [B]: accepted draft tokens + 1; 0 for a sequence that was not to produce."""
