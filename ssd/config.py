"""Settings of a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

MAX_REFRESH_INTERVAL_S = 86_400
MAX_DRAFT = 64
MAX_MATCH_DEPTH = 64

DraftShape = Literal["path", "tree"]


@dataclass(frozen=True)
class DrafterConfig:
    """Settings of a drafter. Raises ValueError for a value out of its range or of a wrong type."""

    capacity: int = 16_000_000
    """Tokens remembered; the newest overwrite the oldest. 8 bytes each, 13 while the index is merged."""
    draft_shape: DraftShape = "path"
    """`path`: a draft has one token per position. `tree`: it may have several."""
    max_draft: int = 32
    """Maximum number of tokens in one draft; 16 reach 98 to 100 % of what 32 do on recorded traffic."""
    cost: float | None = None
    """Cost of verifying one more token of each sequence, as a fraction of a step without drafts: about 0.005 for small
    batches, 0.1 and more for large ones. None: by the drafter's step-time curve. `Progress.cost` overrides it."""
    match_depth: int = 32
    """Maximum match length in tokens; 16 lost 0.1 % on recorded traffic, more than 32 gained nothing."""
    learned_prompt_tokens: int = 32
    """Last tokens of a prompt that are remembered with its output; whole prompts lost 1 % on recorded traffic."""
    idle_sessions: int = 256
    """Maximum number of sessions whose index is kept between two turns."""
    idle_tokens: int = 4_000_000
    """Maximum number of tokens of these sessions together, 8 to 24 bytes each; the longest idle are dropped first."""
    refresh_interval_s: float = 0.01
    """Seconds between two updates of the index with finished requests."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Settings of other drafters by name, those of the engine and third-party ones; the drafters of `ssd` read none."""

    def __post_init__(self) -> None:
        """Check all ranges."""
        for name, least, most in (
            ("capacity", 1, 1 << 32),
            ("max_draft", 1, MAX_DRAFT),
            ("match_depth", 1, MAX_MATCH_DEPTH),
            ("learned_prompt_tokens", 0, 1 << 20),
            ("idle_sessions", 0, 1 << 20),
            ("idle_tokens", 0, 1 << 32),
        ):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, Integral):
                raise ValueError(f"{name} must be an integer, not {given!r}")
            if not least <= int(given) <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {given}")
        if self.cost is not None:
            check_cost(self.cost)
        if not 0 < self.refresh_interval_s <= MAX_REFRESH_INTERVAL_S:
            raise ValueError(
                f"refresh_interval_s must be above 0 and at most a day ({MAX_REFRESH_INTERVAL_S} s), "
                f"not {self.refresh_interval_s}"
            )
        if self.draft_shape not in ("path", "tree"):
            raise ValueError(f"draft_shape must be 'path' or 'tree', not {self.draft_shape!r}")


def check_cost(cost: float) -> None:
    """Raise ValueError for a cost outside (0, 1]."""
    if not 0 < cost <= 1:
        raise ValueError(
            "cost, the fraction of a step that verifying one more token takes, must be greater than 0 and at most 1, "
            f"not {cost}"
        )
