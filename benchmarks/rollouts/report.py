"""The figures of two runs as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.rollouts.runs import Run, Step, differences
from benchmarks.rollouts.settings import Settings
from benchmarks.support.targets import at_most
from engine.drafters.sources import sum_by_name

LARGEST_RATIO = 0.7
"""Time of rollouts with drafts divided by the time without, to reach in the last third of the steps."""


def document(settings: Settings, plain: Run, drafted: Run) -> dict[str, Any]:
    """Return settings, steps, epochs, the comparison and the targets."""
    last = slice(-max(1, len(plain.steps) // 3), None)
    ratios = {
        name: sum(getattr(step, field) for step in drafted.steps[last])
        / sum(getattr(step, field) for step in plain.steps[last])
        for name, field in (("ratio", "rollout_s"), ("cpu_ratio", "cpu_s"))
    }
    found = differences(plain, drafted)
    targets = [
        at_most(0).row("results that differ between the runs", len(found)),
        at_most(LARGEST_RATIO).row("rollout seconds with drafts / without, last third", ratios["ratio"]),
    ]
    return {
        "settings": asdict(settings),
        "drafter": drafted.drafter,
        "differences": found,
        "weights": drafted.weights,
        **ratios,
        "seconds": {"without": plain.seconds, "with": drafted.seconds},
        "epochs": [_epoch(settings, number, plain, drafted) for number in range(_epochs(settings, plain))],
        "steps": [_step(one, other) for one, other in zip(plain.steps, drafted.steps, strict=False)],
        "targets": targets,
    }


def _epochs(settings: Settings, run: Run) -> int:
    return settings.epoch_of(len(run.steps) - 1) + 1


def _step(plain: Step, drafted: Step) -> dict[str, Any]:
    lengths = [len(each.tokens) for each in plain.completions]
    return {
        "reward": float(np.mean(plain.rewards)),
        "loss": float(np.mean(plain.losses)),
        "output_tokens": plain.tokens,
        "mean_tokens": float(np.mean(lengths)),
        "max_tokens": max(lengths),
        "without_s": plain.rollout_s,
        "with_s": drafted.rollout_s,
        "without_cpu_s": plain.cpu_s,
        "with_cpu_s": drafted.cpu_s,
        "update_s": drafted.update_s,
        "tokens_per_step": drafted.tokens / drafted.verify_steps,
    }


def _epoch(settings: Settings, number: int, plain: Run, drafted: Run) -> dict[str, Any]:
    chosen = [index for index in range(len(plain.steps)) if settings.epoch_of(index) == number]
    steps = [drafted.steps[index] for index in chosen if index < len(drafted.steps)]
    counts = sum_by_name(step.by_source for step in steps)
    accepted = sum(each.accepted for each in counts.values())
    return {
        "tokens_per_step": _ratio(sum(step.tokens for step in steps), sum(step.verify_steps for step in steps)),
        "drafted": sum(each.drafted for each in counts.values()),
        "accepted": accepted,
        "share_of_accepted": {name: _ratio(each.accepted, accepted) for name, each in counts.items()},
        "without_s": _seconds(plain.steps, chosen),
        "with_s": _seconds(drafted.steps, chosen),
    }


def _seconds(steps: Sequence[Step], chosen: Sequence[int]) -> float:
    return sum(steps[index].rollout_s for index in chosen if index < len(steps))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
