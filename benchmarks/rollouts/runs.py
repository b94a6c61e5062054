"""What is recorded of a run, the comparison of two runs that must be equal, and their document and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rollouts.problems import Settings
from benchmarks.support.targets import at_most, target_panel
from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages.charts import Axis, Series, line_chart
from drafter_service.observability.pages.tables import html_table
from engine.drafters.sources import DraftCounts, sum_by_name
from engine.scheduling.request import Completion

LARGEST_RATIO = 0.7
"""Time of rollouts with drafts divided by the time without, to reach in the last third of the steps."""
STEP = "training step"
COLORS = ("green", "blue", "violet", "amber", "gray")

Document = Mapping[str, Any]


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
    """Write the rollouts as recorded traffic, see `benchmarks.traces.reading`.

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
        "epochs": [
            _epoch(settings, number, plain, drafted) for number in range(settings.epoch_of(len(plain.steps) - 1) + 1)
        ],
        "steps": [_step(one, other) for one, other in zip(plain.steps, drafted.steps, strict=False)],
        "targets": targets,
    }


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
        "without_s": sum(plain.steps[index].rollout_s for index in chosen),
        "with_s": sum(step.rollout_s for step in steps),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def render_page(document: Document) -> str:
    """Return the page of a document of `benchmarks.rollouts`."""
    steps, epochs, settings = document["steps"], document["epochs"], document["settings"]
    count, rates = len(document["differences"]), _column(epochs, "tokens_per_step")
    rewards = _column(steps, "reward")
    cards = [
        pages.card("results that differ", str(count), "of tokens, rewards, losses and final weights"),
        pages.card("rollouts, with drafts / without", f"{document['ratio']:.2f}", "seconds, last third of the steps"),
        pages.card("tokens per step", f"{rates[-1]:.2f}", f"{rates[0]:.2f} in the first epoch"),
        pages.card("reward", f"{rewards[-1]:.2f}", f"{rewards[0]:.2f} in the first training step"),
    ]
    timing = {"without drafts": _column(steps, "without_s"), "with drafts": _column(steps, "with_s")}
    panels = [
        pages.panel(
            "Rollouts",
            "Seconds of each training step.",
            _lines(STEP, "seconds", timing, ("gray", "green")),
            _table(steps),
        ),
        _panel("Tokens per step", "With drafts, by epoch.", "epoch", rates),
        _panel("Reward", "Mean, equal in both runs.", STEP, rewards),
        _panel("Output", "Mean tokens.", STEP, _column(steps, "mean_tokens")),
        pages.panel("Accepted draft tokens", "Share of each source, by epoch.", _sources(epochs)),
        target_panel(document["targets"]),
    ]
    title = "Rollouts of reinforcement learning, with and without drafts"
    lead = (
        f"Drafter {document['drafter']}, {settings['engines']} engine(s), {settings['problems']} problems, "
        f"{settings['samples']} samples each, {len(steps)} training steps, {document['cores']} cores, "
        f"{document['date']}."
    )
    return pages.page(title, pages.cards(cards) + pages.panels(panels), "python -m benchmarks.rollouts", lead=lead)


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def _panel(title: str, note: str, x: str, values: Sequence[float | None]) -> str:
    return pages.panel(title, note, _lines(x, title.lower(), {title.lower(): values}))


def _sources(epochs: Sequence[Mapping[str, Any]]) -> str:
    shares = _column(epochs, "share_of_accepted")
    names = sorted({name for share in shares for name in share})[: len(COLORS)]
    return _lines("epoch", "share", {name: [share.get(name) or 0.0 for share in shares] for name in names})


def _lines(x: str, y: str, values: Mapping[str, Sequence[float | None]], colors: Sequence[str] = COLORS) -> str:
    """Return a chart of values by number, from 0."""
    largest = max((value for each in values.values() for value in each if value is not None), default=1.0)
    count = max(map(len, values.values()), default=1)
    series = [
        Series(name, color, [(number, value) for number, value in enumerate(each) if value is not None])
        for color, (name, each) in zip(colors, values.items(), strict=False)
    ]
    return line_chart(
        f"{y} by {x}", Axis.to(max(1, count - 1), x, min_step=1, is_exact=True), Axis.to(largest, y), series
    )


def _table(steps: Sequence[Mapping[str, Any]]) -> str:
    heads = ("step", "reward", "tokens", "without drafts, s", "with, s", "tokens per step")
    rows = [
        (
            f"{number}",
            f"{step['reward']:.3f}",
            f"{step['output_tokens']:,}",
            f"{step['without_s']:.2f}",
            f"{step['with_s']:.2f}",
            f"{step['tokens_per_step']:.2f}",
        )
        for number, step in enumerate(steps)
    ]
    return html_table(heads, rows)
