"""Accepting drafts of tokens, paths and trees, without changing the output."""

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


def accepted_path(draft: np.ndarray, parents: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The nodes of a draft tree that the target would have produced itself, int64 [n], from the context on.

    draft: uint32 [k]. parents: int32 [k], indices within the draft, -1 for a child of the context; parents stand before
    their children. chosen: uint32 [k + 1], the target's token behind the context and behind each draft token, as for
    `accepted_length`. The output is those nodes' tokens and `chosen` behind the last of them, drafts or not.
    """
    path: list[int] = []
    at = -1
    # Parents stand before their children, so one pass over the nodes that are right behind theirs finds the path.
    for node in np.flatnonzero(draft == chosen[parents + 1]).tolist():
        if parents[node] == at:
            path.append(node)
            at = node
    return np.array(path, np.int64)
