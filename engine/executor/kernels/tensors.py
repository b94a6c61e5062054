"""Tensors of a step on the device, of fixed shapes whatever the drafts are."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Drafts(NamedTuple):
    """Draft paths of B sequences, padded to K tokens each."""

    tokens: Tensor
    """int32 [B, K]."""
    lengths: Tensor
    """int32 [B]: number of draft tokens; `build_inputs` cuts them to what may still follow the text."""


class VerifyRows(NamedTuple):
    """Rows of B sequences within a step's N rows: each producing sequence's last committed token, then its draft."""

    tokens: Tensor
    """int64 [N]: token of each row of the step."""
    starts: Tensor
    """int32 [B]: row of each sequence's last committed token."""
    counts: Tensor
    """int32 [B]: number of its rows from there on, 1 + draft tokens; 0 if it does not produce."""
    scheduled: Tensor
    """int32 [B]: number of its committed tokens that this step runs; 0 for padding."""
    request_slots: Tensor
    """int64 [B]: no slot appears twice but the idle one."""


class StepInputs(NamedTuple):
    """N rows, divided among B sequences in their order. Padding rows follow the tokens of each sequence and the last
    sequence: token 0 at position 0, whose keys and values are stored in the scratch page.
    """

    tokens: Tensor
    """int64 [N]."""
    positions: Tensor
    """int64 [N]: position of each token in its text."""
    cache_slots: Tensor
    """int64 [N]: page * page_size + offset."""
    request_slots: Tensor
    """int64 [N]: request slot of each row's sequence; the idle one behind the last sequence."""
    starts: Tensor
    """int32 [B + 1]: first row of each sequence, and the end of the last one."""
    contexts: Tensor
    """int32 [B]: number of tokens whose keys and values are in the cache before the step."""
    lengths: Tensor
    """int32 [B]: number of each sequence's rows that are not padding."""
    verify_rows: VerifyRows


class Verified(NamedTuple):
    """Tokens that B sequences produced; W is the largest number of draft tokens + 1."""

    tokens: Tensor
    """int32 [B, W]: accepted draft tokens, then the target's own token; 0 behind the first `counts`."""
    counts: Tensor
    """int32 [B]: accepted draft tokens + 1; 0 for a sequence that did not produce."""
