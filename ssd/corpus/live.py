"""The live tier: the output of running requests, which other requests can draft before it is finished.

The text is kept in blocks of a fixed size. Each block, and text after a gap within a block, begins with a separator and
the last tokens before it. A request's blocks are freed when it finishes, and reused once no query can still read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ssd.corpus.memory import Buffer
from ssd.corpus.ring import PAD, SEPARATOR
from ssd.corpus.rollout import NO_TAG
from ssd.corpus.suffix_array import merge_unsorted
from ssd.corpus.tier import Tier
from ssd.kernels.evidence import BLOCK_BITS

BLOCK = 1 << BLOCK_BITS
NO_OWNER = -1


@dataclass
class RunningOutput:
    """The blocks of a running request."""

    tag: int
    """See `ssd.corpus.rollout.Rollout.tag`."""
    prefix: np.ndarray
    """uint32: the tokens before its next block, used when no block has room."""
    blocks: list[int] = field(default_factory=list)
    end: int = 0
    """Position of its next token; 0: in a new block."""


class LiveTier:
    """Text and suffix array of the outputs of running requests. Only the maintainer thread uses it."""

    def __init__(self, blocks: int, depth: int) -> None:
        self._depth = depth
        self._text = Buffer(blocks * BLOCK + PAD)
        self.owners = np.full(blocks, NO_OWNER, np.int64)
        """int64 [blocks]: the owner of each block."""
        self.tags = np.zeros(blocks, np.uint16)
        """uint16 [blocks]: the tag of each owner."""
        # Block 0 stays empty, so that position 0 can mean a new block.
        self._free = list(range(blocks - 1, 0, -1))
        self._freed: list[int] = []
        self._removed: list[int] = []
        self._running: dict[int, RunningOutput] = {}
        self._new: list[np.ndarray] = []
        self.tier = Tier(blocks * BLOCK)
        self.address = self._text.address

    def start(self, owner: int, prefix: np.ndarray, tag: int = NO_TAG) -> None:
        """Begin a request; prefix: uint32 [n], the last tokens before its output. tag: see `Rollout.tag`."""
        self._running[owner] = RunningOutput(tag, prefix[-self._depth :])

    def skip(self, owner: int, prefix: np.ndarray) -> None:
        """Leave a gap in a request's output; prefix: uint32 [n], the last tokens of the gap."""
        output = self._running.get(owner)
        if output is None:
            return
        output.prefix = prefix[-self._depth :]
        room = -output.end % BLOCK
        if room > 1 + len(output.prefix):
            self._write_prefix(output)
        else:
            output.end = 0

    def extend(self, owner: int, tokens: np.ndarray) -> None:
        """Append a request's output, uint32 [n]; tokens are left out while all blocks are in use."""
        output = self._running.get(owner)
        while output is not None and len(tokens):
            if output.end % BLOCK == 0 and not self._open_block(owner, output):
                output.prefix = np.concatenate((output.prefix, tokens))[-self._depth :]
                return
            part = tokens[: BLOCK - output.end % BLOCK]
            self._text.array[output.end : output.end + len(part)] = part
            first = output.end if self._text.array[output.end - 1] != SEPARATOR else output.end + 1
            self._new.append(np.arange(first, output.end + len(part), dtype=np.uint32))
            output.end += len(part)
            if output.end % BLOCK == 0:
                output.prefix = self._text.array[output.end - self._depth : output.end].copy()
            tokens = tokens[len(part) :]

    def extend_all(self, owners: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Call `extend` for a batch: `owners[i]` produced `tokens[offsets[i]:offsets[i + 1]]`."""
        bounds = offsets.tolist()
        for index, owner in enumerate(owners.tolist()):
            self.extend(owner, tokens[bounds[index] : bounds[index + 1]])

    def finish(self, owner: int) -> None:
        """End a request; the next merge removes its text."""
        output = self._running.pop(owner, None)
        if output is not None:
            self._freed += output.blocks

    def finish_all(self) -> None:
        """End all requests; the rest of their outputs is ignored."""
        for owner in list(self._running):
            self.finish(owner)

    def merge(self) -> bool:
        """Update the suffix array; return whether it changed."""
        if not self._new and not self._freed:
            if self._removed and self.tier.wait_until_unread(0):
                self._free_removed()
            return False
        buffer = self.tier.next_buffer()
        self._free_removed()
        kept = self.tier.newest.positions
        if self._freed:
            self.owners[self._freed] = NO_OWNER
            kept = kept[self.owners[kept >> BLOCK_BITS] != NO_OWNER]
        added = np.concatenate([*self._new, np.empty(0, np.uint32)]).astype(np.uint32)
        added = added[self.owners[added >> BLOCK_BITS] != NO_OWNER]
        merge_unsorted(
            self.address, kept.ctypes.data, len(kept), added.ctypes.data, len(added), buffer.address, self._depth
        )
        self.tier.publish(len(kept) + len(added))
        # Last, so that the next call repeats all of it if there was not enough memory.
        self._removed, self._freed, self._new = self._freed, [], []
        return True

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return 4 * BLOCK * (len(self.owners) - 1 - len(self._free)) + 2 * self.tier.nbytes + self.owners.nbytes

    def _open_block(self, owner: int, output: RunningOutput) -> bool:
        if not self._free:
            return False
        block = self._free.pop()
        start = block * BLOCK
        # A reader that continues past the end of this block must find a separator.
        self._text.array[start : start + BLOCK + 1] = SEPARATOR
        self.owners[block], self.tags[block] = owner, output.tag
        output.blocks.append(block)
        output.end = start
        self._write_prefix(output)
        return True

    def _write_prefix(self, output: RunningOutput) -> None:
        """Skip a slot, which stays a separator, and repeat the tokens before the request's next output after it."""
        first = output.end + 1
        output.end = first + len(output.prefix)
        self._text.array[first : output.end] = output.prefix

    def _free_removed(self) -> None:
        """Free the blocks that the newest suffix array no longer contains."""
        self._free += self._removed
        self._removed = []
