"""What readers yield: documents whose text may still have to be tokenized, and how far the file was read with them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Part = str | np.ndarray
"""Text, or token ids, uint32 [N]."""


class Item(NamedTuple):
    """A document to be."""

    name: str
    prompt: Part | None
    """Its end is enough, unless whole prompts are wanted."""
    output: Part

    @property
    def weight(self) -> int:
        """Bytes of memory, about."""
        prompt = 0 if self.prompt is None else _weight(self.prompt)
        return prompt + _weight(self.output)


class Position(NamedTuple):
    """Where to go on reading a file."""

    offset: int = 0
    """Bytes of the content, rows or tokens: what the kind of file is best counted in."""
    item: int = 0
    """Lines, rows or documents before it."""


class Chunk(NamedTuple):
    """A part of a file."""

    items: list[Item]
    position: Position
    """Where to go on once the items are learned."""
    bytes_read: int
    """How far the file was read, of `File.size`."""


def _weight(part: Part) -> int:
    return len(part) if isinstance(part, str) else part.nbytes
