"""Shapes that an engine pads its steps to. It imports no numba, so that clients of the service can use it."""

from __future__ import annotations

from typing import NamedTuple

MAX_SIZES, MAX_LENGTHS = 256, 65
"""Largest numbers of sizes and of lengths."""


class Padding(NamedTuple):
    """Shapes that an engine pads its steps to. Draft tokens that replace padding take no time."""

    sizes: tuple[int, ...] = ()
    """Ascending numbers of tokens, such as those of CUDA graphs; larger steps are not padded."""
    lengths: tuple[int, ...] = ()
    """Ascending lengths of drafts. All drafts of a step are padded to one of them. If 0 is among them, a step may have
    no drafts. Empty: drafts are not padded."""


NO_PADDING = Padding()
