"""What a host runs, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "engine" / "models" / "assets" / "stdlib-7m"
MAX_TOKENS = 96
MAX_DRAFT = 16
OWN = "ssd"


class Task(NamedTuple):
    """What a method runs."""

    prompts: Sequence[str]
    concurrency: int
    """Number of requests at once."""
    max_tokens: int = MAX_TOKENS
    is_useless: bool = False
    """Whether outputs are random tokens."""


@dataclass
class Run:
    """Totals of some prompts."""

    outputs: list[list[int]] = field(default_factory=list)
    request_steps: int = 0
    """Sum over the steps of the requests that they decoded."""
    cpu_s: float = 0.0
    plugin_cpu_s: float = 0.0
    """Seconds of `cpu_s` in the plug-in's code."""
    wall_s: float = 0.0

    @classmethod
    def total(cls, runs: Sequence[Run]) -> Run:
        """Return the sum of runs."""
        return cls(
            [output for run in runs for output in run.outputs],
            sum(run.request_steps for run in runs),
            sum(run.cpu_s for run in runs),
            sum(run.plugin_cpu_s for run in runs),
            sum(run.wall_s for run in runs),
        )

    @property
    def tokens_per_step(self) -> float:
        """Output tokens after the first of each prompt, per step of a request."""
        return sum(len(output) - 1 for output in self.outputs) / max(1, self.request_steps)


RunTask = Callable[[Task], Run]
"""Runs a task in a host that is loaded."""
