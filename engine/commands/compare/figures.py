"""Figures of drafts, computed from the steps of a run that verified all draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from engine.engine import Engine
from engine.scheduling.report import StepReport
from engine.scheduling.request import Request

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

    parts: list[np.ndarray] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def tokens(self) -> np.ndarray:
        """uint32 [n]."""
        return np.concatenate(self.parts) if self.parts else np.empty(0, np.uint32)

    def add(self, tokens: np.ndarray, accepted: int, depths: np.ndarray) -> int:
        """Add the tokens of a step, uint32 [n], of which the first are accepted; return the length of the output.

        depths: int64 [k], of the verified draft tokens. The step that computes the prompt is not a verify step: most
        drafters cannot draft before it.
        """
        start = sum(map(len, self.parts))
        self.parts.append(tokens)
        if start > 0:
            self.steps.append(Step(start, len(tokens), accepted, tuple(np.bincount(depths)[1:].tolist())))
        return start + len(tokens)


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
            loops = find_loops(output.tokens)
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
            if outputs[sequence_id].add(result.tokens_of(index), int(result.accepted[index]), depths) >= length:
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
