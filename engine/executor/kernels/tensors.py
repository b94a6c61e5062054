"""Tensors of a step on the device. Their shapes do not depend on the lengths of drafts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Drafts(NamedTuple):
    """Draft paths of B sequences, padded to K tokens each."""

    tokens: Tensor
    """int32 [B, K]."""
    lengths: Tensor
    """int32 [B]: number of draft tokens; `build_inputs` drops tokens beyond the sequence's limit."""


class StepInputs(NamedTuple):
    """N rows, divided among B sequences in their order. A sequence's rows are its last committed token, its draft, and
    padding; more padding follows the last sequence. Padding is token 0 at position 0, whose keys and values are stored
    in the scratch page.
    """

    tokens: Tensor
    """int64 [N]."""
    positions: Tensor
    """int64 [N]: position of each token in its text."""
    cache_slots: Tensor
    """int64 [N]: page * page_size + offset."""
    request_slots: Tensor
    """int64 [N]: request slot of each row's sequence; the idle slot for rows after the last sequence."""
    starts: Tensor
    """int32 [B + 1]: first row of each sequence, and the end of the last one."""
    contexts: Tensor
    """int32 [B]: number of tokens whose keys and values are in the cache before the step."""
    counts: Tensor
    """int32 [B]: number of each sequence's rows that are not padding; 0 for a sequence that has ended."""


class Verified(NamedTuple):
    """Tokens that B sequences produced; W is the largest number of draft tokens + 1."""

    tokens: Tensor
    """int32 [B, W]: accepted draft tokens, then the target's own token, then zeros."""
    counts: Tensor
    """int32 [B]: accepted draft tokens + 1; 0 for a sequence that has ended."""
