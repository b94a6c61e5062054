"""Results of a comparison: their fields, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.commands.compare.figures import Figures
from engine.commands.compare.rows import Row
from engine.config import Verification
from ssd.budget.cost_profile import CostProfile
from ssd.config import DraftShape

MIN_SPEEDUP = 1.05
"""Smallest speed-up for which drafting is recommended; measurements vary by a few percent."""
MIN_PROMPTS = 10
"""Smallest number of prompts from which a drafter is recommended."""


@dataclass(frozen=True)
class Condition:
    """What the drafters of one table have in common."""

    verification: Verification
    temperature: float
    concurrency: int
    """Number of requests that run at the same time."""
    part: str = ""
    """What the rows of the table divide the requests by; empty: each row is of all requests."""

    def __str__(self) -> str:
        each = f"temperature {self.temperature:g}, {self.verification}, {self.concurrency} at a time"
        return f"{each}, {self.part}" if self.part else each


@dataclass(frozen=True)
class Result:
    """One drafter under one condition.

    Tokens per step, drafts and acceptance are those of a run that verified all draft tokens; speed is measured with the
    token budget.
    """

    drafter: str
    verification: Verification
    temperature: float
    K: int
    """The requested draft depth."""
    concurrency: int
    has_depth: bool
    """Whether the drafter can limit its depth to K; others draft up to `max_draft` tokens."""
    draft_shape: DraftShape
    tokens_per_step: float
    tokens_per_step_no_loops: float | None
    drafted_per_step: float
    accept_by_position: list[float]
    drafted_by_position: list[float]
    step_ms: float | None
    """Median duration of a step, without the time of drafting; None if not measured."""
    drafting_ms: float | None
    """Median time that drafting adds to a step; None if not measured."""
    identical: bool | None
    """Whether all outputs equal those of `none`; None where they need not."""
    tokens_per_s: float | None
    """Output tokens per second; None before the first round."""
    speedup: float | None
    """Tokens per second divided by those of `none`, median over rounds of the same prompts; None before the first."""
    speedup_range: tuple[float, float] | None
    """Smallest and largest speed-up of a round; None before the first."""
    prompts: int
    """Number of prompts of the rounds so far."""
    part: str = ""
    """As in `Condition`."""

    @classmethod
    def of(cls, row: Row, condition: Condition, figures: Figures, **measured: Any) -> Result:
        """Combine the parts of a result."""
        return cls(
            drafter=row.name,
            K=row.depth,
            has_depth=row.has_depth,
            draft_shape=row.shape,
            **asdict(condition),
            **asdict(figures),
            **measured,
        )

    @property
    def condition(self) -> Condition:
        """What it has in common with the others of its table."""
        return Condition(self.verification, self.temperature, self.concurrency, self.part)

    @property
    def ms_per_drafted(self) -> float | None:
        """Drafting time per verified draft token of a sequence; None without drafts."""
        if self.drafting_ms is None or not self.drafted_per_step:
            return None
        return self.drafting_ms / self.drafted_per_step

    def at_depth(self, depth: int) -> tuple[float, float, float]:
        """Return tokens per step, draft tokens per step, and drafting time with drafts up to a smaller depth."""
        share = min(1.0, depth / max(1, self.K)) if self.has_depth else float(depth > 0)
        return (
            1 + sum(self.accept_by_position[:depth]),
            sum(self.drafted_by_position[:depth]),
            share * (self.drafting_ms or 0.0),
        )

    def best_depth(self, profile: CostProfile | None) -> int | None:
        """Return the depth from 0 to K with the most tokens per second; None for combinations, for drafters that
        cannot limit their depth, and if no durations were measured."""
        if not self.has_depth or "+" in self.drafter or profile is None or self.step_ms is None:
            return None
        depths = range(len(self.accept_by_position) + 1)
        # Both durations were measured in the same run, unlike the profile: other load may have changed since.
        load = self.step_ms / profile.step(self.concurrency * (1 + self.drafted_per_step), self.concurrency)

        def speedup(depth: int) -> float:
            tokens, drafted, drafting_ms = self.at_depth(depth)
            return profile.speedup(tokens, drafted, drafting_ms / load, self.concurrency)

        return max(depths, key=speedup)

    def predicted(self, profile: CostProfile) -> float:
        """Return the speed-up that this acceptance gives with the durations of `profile`."""
        if not self.drafted_per_step:
            return 1.0
        known = profile.drafting(self.drafter.split("@")[0], self.K, self.concurrency)
        drafting_ms = (self.drafting_ms or 0.0) if known is None else known
        return profile.speedup(self.tokens_per_step, self.drafted_per_step, drafting_ms, self.concurrency)


@dataclass(frozen=True)
class Comparison:
    """Everything that the reports show."""

    settings: Mapping[str, object]
    """Settings that all results have in common."""
    profile: CostProfile | None
    """Cost of steps here; None if it was not measured."""
    predicted_for: CostProfile | None = None
    """Cost of steps on other hardware."""
    versions: Mapping[str, str] = field(default_factory=dict)
    results: Sequence[Result] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Why a drafter was not measured, by its name."""
    partial: str = ""
    """Why results are missing; empty if the comparison is complete."""
    conclusion: str = ""
    """What the results show; empty: which drafter to use."""
    notes: Sequence[str] = ()
    """How the figures were measured; empty: as `ssd-engine compare` measures them."""

    @property
    def is_exact(self) -> bool:
        """Whether no output differs that must equal that of `none`."""
        return all(result.identical is not False for result in self.results)

    @property
    def conditions(self) -> list[Condition]:
        """All conditions, in the order of the results."""
        return list(dict.fromkeys(result.condition for result in self.results))

    def of(self, condition: Condition) -> list[Result]:
        """Return the results of a condition."""
        return [result for result in self.results if result.condition == condition]

    def recommendation(self) -> str:
        """Return the conclusion, or one sentence that says which drafter to use."""
        if self.conclusion:
            return self.conclusion
        speedups: dict[tuple[str, int, bool], list[float]] = {}
        prompts = max((result.prompts for result in self.results), default=0)
        if prompts < MIN_PROMPTS:
            return f"No recommendation: it takes at least {MIN_PROMPTS} prompts; the speed was measured with {prompts}."
        for result in self.results:
            if result.speedup is None or result.prompts < MIN_PROMPTS:
                continue
            # Outputs that differ in exact mode are a defect, which no speed makes up for.
            is_right = result.verification == "exact" and result.identical is not False
            if is_right and result.drafter != "none":
                speedups.setdefault((result.drafter, result.K, result.has_depth), []).append(result.speedup)
        most = max(map(len, speedups.values()), default=0)
        means = {key: math.prod(each) ** (1 / len(each)) for key, each in speedups.items() if len(each) == most}
        if not means:
            return "No drafter was measured in exact mode with the outputs of plain decoding, so none is recommended."
        best = max(means, key=lambda key: means[key])
        name = best[0] + (f" with a depth of {best[1]}" if best[2] else "")
        where = f"{most} {'condition' if most == 1 else 'conditions'}"
        if means[best] < MIN_SPEEDUP:
            return f"Do not draft here: the best drafter, {name}, gives {means[best]:.2f}x the tokens/s of none."
        return f"Use {name}: {means[best]:.2f}x the tokens/s of none, geometric mean over {where}."

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "recommendation": self.recommendation(),
            "partial": self.partial,
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "profile": None if self.profile is None else asdict(self.profile),
            "predicted_for": None if self.predicted_for is None else asdict(self.predicted_for),
            "skipped": dict(self.skipped),
            "results": [
                {
                    **asdict(result),
                    "drafting_ms_per_token": result.ms_per_drafted,
                    "best_K": result.best_depth(self.profile),
                    "predicted_speedup": None if self.predicted_for is None else result.predicted(self.predicted_for),
                }
                for result in self.results
            ],
        }
