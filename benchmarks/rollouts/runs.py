"""What is recorded of a run, and the comparison of two runs that must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.rollouts.settings import Settings
from engine.drafters.sources import DraftCounts, sum_by_name
from engine.scheduling.request import Completion


@dataclass(eq=False)
class Step:
    """One training step."""

    prompts: list[np.ndarray]
    """uint32, in the order of the samples: the samples of a group are adjacent."""
    completions: list[Completion]
    rollout_s: float
    cpu_s: float
    """Processor time of the rollouts, all engines together."""
    update_s: float
    """Time to replace the weights before the rollouts."""
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of each part of the batch."""

    @property
    def tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(each.tokens) for each in self.completions)

    @property
    def verify_steps(self) -> int:
        """Number of verify steps, counted per sequence."""
        return sum(each.steps for each in self.completions)

    @property
    def by_source(self) -> dict[str, DraftCounts]:
        """Verified and accepted draft tokens by source."""
        return sum_by_name(each.by_source for each in self.completions)


@dataclass(eq=False)
class Run:
    """One run: its steps, and a digest of the final weights."""

    drafter: str
    steps: list[Step] = field(default_factory=list)
    weights: str = ""
    """SHA-256 of the final weights."""
    seconds: float = 0.0


def differences(first: Run, second: Run) -> list[str]:
    """Return a sentence for each kind of result in which two runs differ; empty if they are equal bit for bit."""
    found = []
    if len(first.steps) != len(second.steps):
        found.append(f"one run has {len(first.steps)} steps, the other {len(second.steps)}")
    pairs = list(zip(first.steps, second.steps, strict=False))
    for name, differ in (
        ("tokens", _tokens_differ),
        ("rewards", lambda one, other: one.rewards != other.rewards),
        ("losses", lambda one, other: one.losses != other.losses),
    ):
        steps = [number for number, (one, other) in enumerate(pairs) if differ(one, other)]
        if steps:
            found.append(f"{name} differ in {len(steps)} of {len(pairs)} steps, first in step {steps[0]}")
    if first.weights != second.weights:
        found.append("the final weights differ")
    return found


def _tokens_differ(one: Step, other: Step) -> bool:
    outputs = ([each.tokens for each in step.completions] for step in (one, other))
    return any(not np.array_equal(left, right) for left, right in zip(*outputs, strict=True))


def write_trace(path: Path, steps: Sequence[Step], settings: Settings) -> None:
    """Write the rollouts as recorded traffic, see `ssd.replay.Recording.load`.

    `group` is the number of the problem, and `version` the training step.
    """
    rows, tokens = [], []
    for version, step in enumerate(steps):
        groups = np.repeat(settings.problems_of(version), settings.samples).tolist()
        for group, prompt, completion in zip(groups, step.prompts, step.completions, strict=True):
            rows.append((len(prompt), len(completion.tokens), len(rows), 0, group, 0, version))
            tokens += [prompt, completion.tokens]
    names = ("prompt_len", "output_len", "session", "turn", "group", "shared_prefix", "version")
    columns = dict(zip(names, np.array(rows, np.int32).T, strict=True))
    np.savez_compressed(path, tokens=np.concatenate(tokens).astype(np.uint32), **columns)
