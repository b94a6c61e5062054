"""Figures of drafts, results of a comparison, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from engine.commands.compare.rows import Row
from engine.config import Verification
from engine.engine import Engine
from engine.scheduling.report import StepReport
from engine.scheduling.request import Request
from ssd.budget.cost_profile import CostProfile

T = TypeVar("T")
LOOP_TOKENS = 16
"""Minimum length of a loop: consecutive tokens that equal those a fixed distance of at most `LOOP_PERIOD` earlier."""
LOOP_PERIOD = 64


class Step(NamedTuple):
    """One verify step of one output."""

    start: int
    """Number of output tokens before the step."""
    tokens: int
    """Number of tokens that the step committed."""
    accepted: int
    """Number of draft tokens among them."""
    drafted: tuple[int, ...]
    """Number of verified draft tokens at each depth, from 1."""


@dataclass
class Output:
    """The tokens of one request, and its verify steps."""

    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def add(self, tokens: np.ndarray, accepted: int, depths: np.ndarray) -> None:
        """Add the tokens of a step, uint32 [n], of which the first are accepted.

        depths: int64 [k], of the verified draft tokens. The step that computes the prompt is not a verify step: most
        drafters cannot draft before it.
        """
        if self.tokens:
            drafted = tuple(np.bincount(depths)[1:].tolist())
            self.steps.append(Step(len(self.tokens), len(tokens), accepted, drafted))
        self.tokens += tokens.tolist()


@dataclass(frozen=True)
class Figures:
    """Means over verify steps."""

    tokens_per_step: float
    tokens_per_step_no_loops: float | None = None
    """Mean over the steps that start outside of loops; None if not requested."""
    drafted_per_step: float = 0.0
    accept_by_position: list[float] = field(default_factory=list)
    """Share of steps that accepted the draft token at each depth from 1, so that tokens per step are 1 + their sum."""
    drafted_by_position: list[float] = field(default_factory=list)
    """Number of verified draft tokens at each depth."""

    @classmethod
    def of(cls, outputs: Sequence[Output], length: int, *, has_loops: bool) -> Figures:
        """Compute the figures from the steps that start within the first `length` tokens of each output."""
        steps, outside = list[Step](), list[Step]()
        for output in outputs:
            loops = find_loops(np.array(output.tokens, np.uint32))
            own = [step for step in output.steps if step.start < length]
            steps += own
            outside += [step for step in own if not loops[step.start]]
        count = max(1, len(steps))
        depth = max((len(step.drafted) for step in steps), default=0)
        return cls(
            tokens_per_step=_mean_tokens(steps),
            tokens_per_step_no_loops=_mean_tokens(outside) if has_loops and outside else None,
            drafted_per_step=sum(sum(step.drafted) for step in steps) / count,
            accept_by_position=[sum(step.accepted > place for step in steps) / count for place in range(depth)],
            drafted_by_position=[
                sum(step.drafted[place] for step in steps if place < len(step.drafted)) / count
                for place in range(depth)
            ],
        )


def _mean_tokens(steps: Sequence[Step]) -> float:
    return sum(step.tokens for step in steps) / max(1, len(steps))


def run_group(
    engine: Engine, requests: Sequence[Request], length: int, observe: Callable[[StepReport], None] = lambda _: None
) -> list[Output]:
    """Run requests together and return their outputs, each of at least `length` tokens unless it ends before.

    A request is cancelled when it has that many tokens. Requests should allow further ones, because a draft at the end
    of an output is cut short. `observe`: called with the report of each step.
    """
    outputs = {engine.add(request): Output() for request in requests}
    while engine.scheduler.has_work:
        report = engine.step()
        observe(report)
        if (result := report.result) is None:
            continue
        for index in np.flatnonzero(result.lengths).tolist():
            sequence_id, depths = int(result.ids[index]), result.draft_depths[result.draft_of(index)]
            output = outputs[sequence_id]
            output.add(result.tokens_of(index), int(result.accepted[index]), depths)
            if len(output.tokens) >= length:
                engine.cancel(sequence_id)
    return list(outputs.values())


def groups(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Divide items into groups of `size`, the last one smaller."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group


def find_loops(tokens: np.ndarray) -> np.ndarray:
    """Return which tokens, of uint32 [N], are part of a loop, bool [N]."""
    looping = np.zeros(len(tokens), bool)
    for period in range(1, LOOP_PERIOD + 1):
        repeats = tokens[period:] == tokens[:-period]
        for end in range(LOOP_TOKENS, len(repeats) + 1):
            if repeats[end - LOOP_TOKENS : end].all():
                looping[period + end - LOOP_TOKENS : period + end] = True
    return looping


MIN_SPEEDUP = 1.05
"""Smallest speed-up for which drafting is recommended; measurements vary by a few percent."""
MIN_PROMPTS = 10
"""Smallest number of prompts from which a drafter is recommended."""
MAX_SPREAD = 2.0
"""Largest ratio of two speed-ups of rounds that is not mentioned with a recommendation."""


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

    `figures` are those of a run that verified all draft tokens; speed is measured with the token budget.
    """

    row: Row
    condition: Condition
    figures: Figures
    identical: bool | None
    """Whether all outputs equal those of `none`; None where they need not."""
    step_ms: float | None = None
    """Median duration of a step, without the time of drafting; None if not measured."""
    drafting_ms: float | None = None
    """Median time that drafting adds to a step; None if not measured."""
    tokens_per_s: float | None = None
    """Output tokens per second; None before the first round."""
    speedup: float | None = None
    """Tokens per second divided by those of `none`, median over rounds of the same prompts; None before the first."""
    speedup_range: tuple[float, float] | None = None
    """Smallest and largest speed-up of a round; None before the first."""
    prompts: int = 0
    """Number of prompts of the rounds so far."""

    @property
    def ms_per_drafted(self) -> float | None:
        """Drafting time per verified draft token of a sequence; None without drafts."""
        drafted = self.figures.drafted_per_step
        return None if self.drafting_ms is None or not drafted else self.drafting_ms / drafted

    def best_depth(self, profile: CostProfile | None) -> int | None:
        """Return the depth from 0 to K with the most tokens per second; None for combinations, for drafters that
        cannot limit their depth, and if no durations were measured."""
        if not self.row.has_depth or len(self.row.kinds) > 1 or profile is None or self.step_ms is None:
            return None
        figures = self.figures
        # Both durations were measured in the same run, unlike the profile: other load may have changed since.
        concurrency = self.condition.concurrency
        load = self.step_ms / profile.step(concurrency * (1 + figures.drafted_per_step), concurrency)

        def speedup(depth: int) -> float:
            tokens, drafted = 1 + sum(figures.accept_by_position[:depth]), sum(figures.drafted_by_position[:depth])
            drafting_ms = min(1.0, depth / max(1, self.row.depth)) * (self.drafting_ms or 0.0)
            return profile.speedup(tokens, drafted, drafting_ms / load, concurrency)

        return max(range(len(figures.accept_by_position) + 1), key=speedup)

    def predicted(self, profile: CostProfile) -> float:
        """Return the speed-up that this acceptance gives with the durations of `profile`."""
        figures, concurrency = self.figures, self.condition.concurrency
        if not figures.drafted_per_step:
            return 1.0
        known = profile.drafting(self.row.name.split("@")[0], self.row.depth, concurrency)
        drafting_ms = (self.drafting_ms or 0.0) if known is None else known
        return profile.speedup(figures.tokens_per_step, figures.drafted_per_step, drafting_ms, concurrency)

    def as_json(self) -> dict[str, Any]:
        """Return all figures by name."""
        row = self.row
        names = {"drafter": row.name, "K": row.depth, "has_depth": row.has_depth, "draft_shape": row.shape}
        own = {name: value for name, value in vars(self).items() if name not in ("row", "condition", "figures")}
        return {**names, **asdict(self.condition), **asdict(self.figures), **own}


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
    def tables(self) -> dict[Condition, list[Result]]:
        """The results by condition, in their order."""
        found: dict[Condition, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.condition, []).append(result)
        return found

    def recommendation(self) -> str:
        """Return the conclusion, or one sentence that says which drafter to use."""
        if self.conclusion:
            return self.conclusion
        speedups: dict[str, list[float]] = {}
        rounds: dict[str, list[float]] = {}
        prompts = max((result.prompts for result in self.results), default=0)
        if prompts < MIN_PROMPTS:
            return f"No recommendation: it takes at least {MIN_PROMPTS} prompts; the speed was measured with {prompts}."
        for result in self.results:
            # Outputs that differ in exact mode are a defect, which no speed makes up for.
            is_right = result.condition.verification == "exact" and result.identical is not False
            if is_right and result.row.name != "none" and result.speedup is not None and result.prompts >= MIN_PROMPTS:
                name = result.row.name + (f" with a depth of {result.row.depth}" if result.row.has_depth else "")
                speedups.setdefault(name, []).append(result.speedup)
                rounds.setdefault(name, []).extend(result.speedup_range or ())
        most = max(map(len, speedups.values()), default=0)
        means = {name: math.prod(each) ** (1 / len(each)) for name, each in speedups.items() if len(each) == most}
        if not means:
            return "No drafter was measured in exact mode with the outputs of plain decoding, so none is recommended."
        best = max(means, key=lambda name: means[name])
        where = f"{most} {'condition' if most == 1 else 'conditions'}"
        if means[best] < MIN_SPEEDUP:
            return f"Do not draft here: the best drafter, {best}, gives {means[best]:.2f}x the tokens/s of none."
        use = f"Use {best}: {means[best]:.2f}x the tokens/s of none, geometric mean over {where}."
        low, high = min(rounds[best]), max(rounds[best])
        doubt = f" But its rounds gave {low:.2f}x to {high:.2f}x: measure again with more prompts, on an idle machine."
        return use + (doubt if low < 1 or high > MAX_SPREAD * low else "")

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        target = self.predicted_for
        return {
            "recommendation": self.recommendation(),
            "partial": self.partial,
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "profile": None if self.profile is None else asdict(self.profile),
            "predicted_for": None if target is None else asdict(target),
            "skipped": dict(self.skipped),
            "results": [
                {
                    **result.as_json(),
                    "drafting_ms_per_token": result.ms_per_drafted,
                    "best_K": result.best_depth(self.profile),
                    "predicted_speedup": None if target is None else result.predicted(target),
                }
                for result in self.results
            ],
        }
