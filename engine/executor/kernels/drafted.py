"""What the device runs and verifies, and what comes of it: fixed shapes, whatever the drafts are."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Prepared(NamedTuple):
    """Paths of B sequences, made for a text that may have grown since; padded to P tokens each."""

    tokens: Tensor
    """int32 [B, P]."""
    sizes: Tensor
    """int32 [B]: tokens that count."""
    lengths: Tensor
    """int32 [B]: of the texts that they follow."""
    most: Tensor
    """int32 [B]: tokens to verify at most."""


class Drafts(NamedTuple):
    """Drafts of B sequences, padded to K tokens each."""

    tokens: Tensor
    """int32 [B, K]."""
    lengths: Tensor
    """int32 [B]: draft tokens that count; those beyond a sequence's room do not, whatever this says."""


class Drafted(NamedTuple):
    """Rows of B sequences in flat arrays. A sequence that is to produce has a row for its last committed token, then
    one for each of its draft tokens; there is at least one row in all, be it padding.
    """

    tokens: Tensor
    """int64 [R]."""
    starts: Tensor
    """int32 [B]: each sequence's first row."""
    counts: Tensor
    """int32 [B]: its rows; 0 if it is not to produce."""
    scheduled: Tensor
    """int32 [B]: its committed tokens that this step runs; 0 for padding."""
    seats: Tensor
    """int64 [B]: where it sits in the state; only the idle seat may come more than once."""


class StepInputs(NamedTuple):
    """N rows, of which each of B sequences has some, one behind the other. Behind a sequence's tokens, and behind the
    last sequence, they are padding: token 0 at position 0, whose keys and values go to scratch.
    """

    tokens: Tensor
    """int64 [N]."""
    positions: Tensor
    """int64 [N]: within each token's text."""
    slots: Tensor
    """int64 [N]: page * page_size + offset."""
    seats: Tensor
    """int64 [N]: whose rows they are; the idle seat's behind the last sequence."""
    starts: Tensor
    """int32 [B + 1]: where each sequence's rows begin, and where the last one's end."""
    contexts: Tensor
    """int32 [B]: tokens before, whose keys and values are in the cache."""
    lengths: Tensor
    """int32 [B]: tokens of each sequence that are none of padding."""
    drafted: Drafted
    """Those rows as `verify` takes them."""


class Verified(NamedTuple):
    """What B sequences produced, W = most draft tokens + 1."""

    tokens: Tensor
    """int32 [B, W]: the first `counts` of each row: accepted draft tokens and the target's own; 0 behind them."""
    counts: Tensor
    """int32 [B]: accepted draft tokens + 1; 0 for a sequence that was not to produce."""
