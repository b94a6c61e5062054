"""Counters of what was drafted and what became of it. Plain integers, always on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ssd.draft import Path, Source

MATCH_LENGTH_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Lower ends; match length 0 means that nothing was found."""


@dataclass
class Tally:
    """Drafts, draft tokens that were verified, and those accepted."""

    drafts: int = 0
    verified: int = 0
    accepted: int = 0

    def add(self, verified: int, accepted: int) -> None:
        """Count one draft."""
        self.drafts += 1
        self.verified += verified
        self.accepted += accepted


@dataclass
class Stats:
    """Counters of one drafter since it began. Only tokens that the target verified count as drafted."""

    steps: int = 0
    """Sequence steps, with or without a draft."""
    committed: int = 0
    """Tokens that the target produced, over all sequences."""
    hits: int = 0
    """Sequence steps for which something was drafted and verified."""
    by_source: dict[Source, Tally] = field(default_factory=lambda: {source: Tally() for source in Source})
    by_match_length: dict[int, Tally] = field(
        default_factory=lambda: {length: Tally() for length in MATCH_LENGTH_BUCKETS}
    )
    """By the lower end of a bucket of match lengths."""
    verified_at: list[int] = field(default_factory=list)
    """By position in the draft, from 0."""
    accepted_at: list[int] = field(default_factory=list)

    def record(self, draft: Path, committed: int, verified: int, accepted: int) -> None:
        """Note the outcome of one sequence's last draft."""
        self.steps += 1
        self.committed += committed
        if verified == 0:
            return
        self.hits += 1
        self.by_source[draft.source].add(verified, accepted)
        bucket = max(length for length in MATCH_LENGTH_BUCKETS if length <= draft.match_length)
        self.by_match_length[bucket].add(verified, accepted)
        for counts, upto in ((self.verified_at, verified), (self.accepted_at, accepted)):
            counts.extend([0] * (upto - len(counts)))
            for position in range(upto):
                counts[position] += 1

    @property
    def verified(self) -> int:
        """Draft tokens that the target verified."""
        return sum(tally.verified for tally in self.by_source.values())

    @property
    def accepted(self) -> int:
        """Draft tokens that it kept."""
        return sum(tally.accepted for tally in self.by_source.values())

    def summary(self) -> Mapping[str, float]:
        """The figures that people ask for first."""
        return {
            "hit_rate": self.hits / max(1, self.steps),
            "drafted": self.verified,
            "accepted": self.accepted,
            "acceptance": self.accepted / max(1, self.verified),
            "tokens_per_step": self.committed / max(1, self.steps),
        }
