"""Positions of a text sorted by what stands before them, read backwards.

Position p of a text stands for the gap before `text[p]`: its key is text[p-1], text[p-2], ..., its
continuation text[p], text[p+1], ... Of two keys the one that ends first sorts first. Keys do not
change when the text grows at its end, and positions that share their last tokens lie side by side.
"""

from __future__ import annotations

import numpy as np
from pydivsufsort import divsufsort

from ssd.ring import SEPARATOR


def full_order(text: np.ndarray) -> np.ndarray:
    """Every position of `text`, uint32 [N], that has both a key and a continuation, sorted; uint32 [M].

    A position behind a separator has no key: it begins a request.
    """
    if len(text) < 2:
        return np.empty(0, np.uint32)
    # Suffix i of the reversed text is the key of position N - i.
    order = len(text) - divsufsort(np.ascontiguousarray(text[::-1]))
    usable = (order < len(text)) & (text[order - 1] != SEPARATOR)
    return order[usable].astype(np.uint32)


def forward_order(text: np.ndarray) -> np.ndarray:
    """The suffix array of `text`, uint32 [N]: positions sorted by what stands from them on; uint32 [N]."""
    if len(text) == 0:
        return np.empty(0, np.uint32)
    return divsufsort(np.ascontiguousarray(text)).astype(np.uint32)
