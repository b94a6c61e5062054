"""Rollouts of reinforcement learning: which problem a request samples, and with which version of the policy."""

from __future__ import annotations

from dataclasses import dataclass

from ssd.corpus.requests import hash_of

MAX_GROUP_BYTES = 512
MAX_VERSION = (1 << 32) - 1
GROUP_TAGS, VERSION_TAGS = 255, 256
TAGGED_BITS = 5
TAGGED = 1 << TAGGED_BITS
"""Number of slots of the ring that share a tag."""
NO_TAG = 0
"""Tag of text that is no rollout."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A request that samples a problem. Raises ValueError for a group or a version out of its range."""

    group: str
    """Name of the problem, the same in all epochs; at most 512 bytes in UTF-8, not empty."""
    version: int = 0
    """Training step of the policy's weights, 0 to 2^32 - 1."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        try:
            size = len(self.group.encode())
        except UnicodeEncodeError:
            # It could not be sent to a service.
            raise ValueError("group must be text that has an encoding in UTF-8") from None
        if not 0 < size <= MAX_GROUP_BYTES:
            raise ValueError(f"group must have 1 to {MAX_GROUP_BYTES} bytes, not {size}")
        if not 0 <= self.version <= MAX_VERSION:
            raise ValueError(f"version must be 0 to {MAX_VERSION}, not {self.version}")

    @property
    def tag(self) -> int:
        """16 bits, never `NO_TAG`: a hash of the group in the low byte, 1 to 255, and the version's low byte above it.

        Groups with equal hashes are taken for one: their text counts as evidence for each other.
        """
        return 1 + hash_of(self.group) % GROUP_TAGS + self.version % VERSION_TAGS * 256
