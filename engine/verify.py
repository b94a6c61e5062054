"""Accepting drafts without changing the output."""

from __future__ import annotations

import numpy as np


def accepted_length(draft: np.ndarray, chosen: np.ndarray) -> int:
    """How many leading draft tokens the target would have produced itself.

    draft: uint32 [k]. chosen: uint32 [k + 1], the target's token after the context, after the context and one draft
    token, and so on. Each `chosen` is what plain decoding would produce at its place (greedily, or with noise keyed by
    position), provided that the draft before it is right; so the output is `chosen[:accepted + 1]`, drafts or not.
    """
    differs = np.flatnonzero(draft != chosen[:-1])
    return int(differs[0]) if len(differs) else len(draft)
