"""Settings of a drafter. Numbers that someone chose say how they were found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_REFRESH_INTERVAL_S = 86_400

PolicyName = Literal["suffix", "article"]


@dataclass(frozen=True)
class DrafterConfig:
    """How much a drafter remembers and how it drafts."""

    capacity: int = 16_000_000
    """Tokens remembered; the newest overwrite the oldest."""
    policy: PolicyName = "suffix"
    """`suffix`: longest match, frequency-ranked. `article`: the plain scheme that it is measured against."""
    max_draft: int = 32
    """Most tokens in one draft."""
    samples: int = 32
    """Occurrences that a draft is voted from; more were worth less than 0.5 % on recorded traffic."""
    match_depth: int = 32
    """Most context tokens that are matched; more bought nothing on recorded traffic."""
    min_path_odds: float = 0.1
    """A draft ends before the odds that all of it is accepted fall below this."""
    learned_prompt_tokens: int = 32
    """How many of a prompt's last tokens are remembered with its output; all of them cost 1 % on recorded traffic."""
    refresh_interval_s: float = 0.25
    """How often finished requests become draftable; a large corpus takes longer."""

    def __post_init__(self) -> None:
        """Raises ValueError for a setting out of its range."""
        for name, least in (("max_draft", 1), ("samples", 1), ("match_depth", 1), ("learned_prompt_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.min_path_odds <= 1:
            raise ValueError(f"min_path_odds is a probability, not {self.min_path_odds}")
        if not 0 < self.refresh_interval_s <= MAX_REFRESH_INTERVAL_S:
            raise ValueError(
                f"refresh_interval_s must be above 0 and at most a day ({MAX_REFRESH_INTERVAL_S} s), "
                f"not {self.refresh_interval_s}"
            )
        if self.policy not in ("suffix", "article"):
            raise ValueError(f"policy must be 'suffix' or 'article', not {self.policy!r}")
