"""Figures of `benchmarks.engine` from the runs of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from benchmarks.support.serving import Run
    from engine.scheduling.times import Stage

FORCED = "forced"
"""Name for drafting only what a grammar forces."""
Row = dict[str, Any]
Case = tuple[str, int]
"""Name of a drafter or peer, and the number of requests that run at the same time."""
STAGES: tuple[Stage, ...] = ("schedule", "draft", "forward", "verify", "commit")


def rows_of(rounds: Mapping[Case, Sequence[Run]], *, replayed: bool) -> list[Row]:
    """Return a row per case: medians over its rounds, ratios to `none` within each round."""
    return [
        row_of(drafter, concurrency, runs, rounds.get(("none", concurrency)), replayed=replayed)
        for (drafter, concurrency), runs in rounds.items()
    ]


def row_of(drafter: str, concurrency: int, runs: Sequence[Run], plain: Sequence[Run] | None, *, replayed: bool) -> Row:
    """Return the figures of one case; `plain`: the runs of `none` in the same rounds."""
    pairs = [] if plain is None else list(zip(runs, plain, strict=True))
    has_steps = bool(runs[0].steps)
    return {
        "drafter": drafter,
        "concurrency": concurrency,
        "tokens_per_s": _median(runs, lambda run: run.tokens / run.seconds, 1),
        "speedup_vs_none": round(median(_speedup(run, other) for run, other in pairs), 3) if pairs else None,
        "cpu_ms_per_token": _median(runs, lambda run: 1e3 * run.cpu_seconds / run.tokens, 3) if has_steps else None,
        "itl_ms_p50": _median(runs, lambda run: 1e3 * _percentile(_gaps(run), 50), 3),
        "itl_ms_p99": _median(runs, lambda run: 1e3 * _percentile(_gaps(run), 99), 3),
        "ttft_ms_p50": _median(runs, lambda run: 1e3 * _percentile([clock.ttft for clock in run.clocks], 50), 3),
        "tokens_per_step": _median(runs, lambda run: run.tokens / run.deliveries, 3),
        "drafted_per_step": (
            None if runs[0].drafted is None else _median(runs, lambda run: (run.drafted or 0) / run.deliveries, 3)
        ),
        "overhead_ms_per_step": _median(runs, lambda run: 1e3 * overhead(run, concurrency), 4) if has_steps else None,
        "share": {stage: _median(runs, lambda run: share(run, stage), 4) for stage in STAGES} if has_steps else None,  # noqa: B023  # called immediately
        "peak_mib": _median(runs, lambda run: run.peak_bytes / (1 << 20), 0),
        "identical_to_none": None if replayed or not pairs else all(_identical(run, other) for run, other in pairs),
    }


def overhead(run: Run, concurrency: int) -> float:
    """Return the median seconds of a step outside model and drafter, over full steps if there are any."""
    full = [times.overhead for times, sequences in run.steps if sequences == concurrency]
    return median(full or [times.overhead for times, _ in run.steps])


def share(run: Run, stage: Stage) -> float:
    """Return a stage's share of the time of all steps."""
    return sum(getattr(times, stage) for times, _ in run.steps) / sum(times.total for times, _ in run.steps)


def _speedup(run: Run, other: Run) -> float:
    return (run.tokens / run.seconds) / (other.tokens / other.seconds)


def _identical(run: Run, other: Run) -> bool:
    return all(np.array_equal(own, its) for own, its in zip(run.outputs, other.outputs, strict=True))


def _gaps(run: Run) -> list[float]:
    return [gap for clock in run.clocks for gap in clock.gaps]


def _percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile; 0 without values, since an output of one token has no gaps."""
    return float(np.percentile(values, percent)) if values else 0.0


def _median(runs: Sequence[Run], figure: Callable[[Run], float], digits: int) -> float:
    return round(median(figure(run) for run in runs), digits)
