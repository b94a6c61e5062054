"""What running requests have produced so far, draftable by others before they finish.

The text lies in blocks of a fixed size, each led by a separator and the last tokens before it, and so is text behind a
gap within a block. A request's blocks are freed when it finishes, and written again once no query can still read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ssd.corpus.memory import Buffer
from ssd.corpus.ring import PAD, SEPARATOR
from ssd.corpus.suffix_array import find_places, merge_some, sort_positions
from ssd.corpus.tier import Tier
from ssd.kernels.evidence import OWNER_BITS

BLOCK = 1 << OWNER_BITS
NOBODY = -1


@dataclass
class Growing:
    """A running request's blocks."""

    lead: np.ndarray
    """uint32: the tokens before its next block, where it has none that has room."""
    blocks: list[int] = field(default_factory=list)
    end: int = 0
    """Where its next token goes; 0: into a new block."""


class LiveTier:
    """The outputs of running requests, in order. Only the maintainer calls it."""

    def __init__(self, blocks: int, depth: int) -> None:
        self._depth = depth
        self._text = Buffer(blocks * BLOCK + PAD)
        self.owners = np.full(blocks, NOBODY, np.int64)
        """int64 [blocks]: the owner of each block."""
        # Block 0 stays empty, so that 0 is no place for a token.
        self._free = list(range(blocks - 1, 0, -1))
        self._freed: list[int] = []
        self._left_out: list[int] = []
        self._growing: dict[int, Growing] = {}
        self._new: list[np.ndarray] = []
        self.tier = Tier(blocks * BLOCK)
        self.address = self._text.address

    def start(self, owner: int, lead: np.ndarray) -> None:
        """A request begins; `lead`, uint32: the last tokens of its prompt."""
        self._growing[owner] = Growing(lead[-self._depth :])

    def skip(self, owner: int, lead: np.ndarray) -> None:
        """A request has produced what was not told; `lead`, uint32: the last tokens of that."""
        growing = self._growing.get(owner)
        if growing is None:
            return
        growing.lead = lead[-self._depth :]
        room = -growing.end % BLOCK
        if room > 1 + len(growing.lead):
            self._lead_in(growing)
        else:
            growing.end = 0

    def extend(self, owner: int, tokens: np.ndarray) -> None:
        """A request produced tokens, uint32 [n]. What finds no room is left out."""
        growing = self._growing.get(owner)
        while growing is not None and len(tokens):
            if growing.end % BLOCK == 0 and not self._open_block(owner, growing):
                growing.lead = np.concatenate((growing.lead, tokens))[-self._depth :]
                return
            part = tokens[: BLOCK - growing.end % BLOCK]
            self._text.array[growing.end : growing.end + len(part)] = part
            first = growing.end if self._text.array[growing.end - 1] != SEPARATOR else growing.end + 1
            self._new.append(np.arange(first, growing.end + len(part), dtype=np.uint32))
            growing.end += len(part)
            if growing.end % BLOCK == 0:
                growing.lead = self._text.array[growing.end - self._depth : growing.end].copy()
            tokens = tokens[len(part) :]

    def extend_all(self, owners: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """`extend` for a batch: `owners[i]` produced `tokens[offsets[i]:offsets[i + 1]]`."""
        bounds = offsets.tolist()
        for index, owner in enumerate(owners.tolist()):
            self.extend(owner, tokens[bounds[index] : bounds[index + 1]])

    def finish(self, owner: int) -> None:
        """A request has ended; its text leaves with the next merge."""
        growing = self._growing.pop(owner, None)
        if growing is not None:
            self._freed += growing.blocks

    def merge(self) -> bool:
        """Bring the order up to date; returns whether it changed."""
        if not self._new and not self._freed:
            if self._left_out and self.tier.wait_until_unread(0):
                self._free_left_out()
            return False
        buffer = self.tier.next_buffer()
        self._free_left_out()
        self._left_out, self._freed = self._freed, []
        kept = self.tier.order.positions
        if self._left_out:
            self.owners[self._left_out] = NOBODY
            kept = kept[self.owners[kept >> OWNER_BITS] != NOBODY]
        added = np.concatenate([*self._new, np.empty(0, np.uint32)]).astype(np.uint32)
        added = added[self.owners[added >> OWNER_BITS] != NOBODY]
        self._new = []
        sort_positions(self.address, added.ctypes.data, len(added), self._depth)
        places = np.empty(len(added), np.int64)
        find_places(self.address, kept.ctypes.data, len(kept), added.ctypes.data, 0, places, len(added), self._depth)
        everything = 1 << 40
        size = merge_some(
            kept.ctypes.data,
            len(kept),
            added.ctypes.data,
            places,
            len(added),
            0,
            0,
            buffer.address,
            0,
            0,
            everything,
            everything,
            everything,
        )[2]
        self.tier.publish(size)
        return True

    @property
    def nbytes(self) -> int:
        """Memory that is held."""
        return 4 * BLOCK * (len(self.owners) - 1 - len(self._free)) + 2 * self.tier.nbytes + self.owners.nbytes

    def _open_block(self, owner: int, growing: Growing) -> bool:
        if not self._free:
            return False
        block = self._free.pop()
        start = block * BLOCK
        # Whoever reads on from the end of this block must not find an unused one.
        self._text.array[start : start + BLOCK + 1] = SEPARATOR
        self.owners[block] = owner
        growing.blocks.append(block)
        growing.end = start
        self._lead_in(growing)
        return True

    def _lead_in(self, growing: Growing) -> None:
        """Leave a separator where a request's text goes on, and write the tokens before it."""
        first = growing.end + 1
        growing.end = first + len(growing.lead)
        self._text.array[first : growing.end] = growing.lead

    def _free_left_out(self) -> None:
        """Nobody reads the blocks any more that the newest order left out."""
        self._free += self._left_out
        self._left_out = []
