"""Compute figures from the tallies of replays, and compare drafters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.support.drafters import Candidate

if TYPE_CHECKING:
    from benchmarks.support.replaying import Tally

BINS = 10
"""Number of bins of the expected calibration error, of equal width."""
BY_VERSION = "version"
"""Concurrency of synchronous rollouts: all requests of a version at once, then all of the next version."""
BLOCKS = 20
"""Number of parts of a replay that are counted apart, if it has as many requests."""

Row = dict[str, Any]


def figures(tally: Tally, cost: float) -> Row:
    """Return a replay's figures if each draft token costs `cost` of a step."""
    counts, drafted = tally.counts, int(tally.counts.drafted.sum())
    late_steps = int(counts.steps[tally.is_late].sum())
    p50, p99 = np.percentile(np.array(tally.draft_s) * 1e6, [50, 99])
    probs, agrees = np.array(tally.path_probs), np.array(tally.agrees, bool)
    return {
        "output_tokens": tally.output_tokens,
        "steps": int(counts.steps.sum()),
        "tokens_per_step": round(counts.tokens_per_step, 4),
        "tokens_per_step_late": round(int(counts.tokens[tally.is_late].sum()) / late_steps, 4) if late_steps else None,
        "drafted_per_step": round(counts.drafted_per_step, 4),
        "accept_rate": round(int(counts.accepted.sum()) / drafted, 4) if drafted else None,
        "S": round(counts.speedup_at(cost), 4),
        "ece": calibration_error(probs[tally.cold_tokens :], agrees[tally.cold_tokens :]) if tally.has_probs else None,
        "ece_all": calibration_error(probs, agrees) if tally.has_probs else None,
        "draft_us_p50": round(float(p50), 2),
        "draft_us_p99": round(float(p99), 2),
        "insert_us_per_token": round(counts.other_s * 1e6 / (tally.prompt_tokens + tally.output_tokens), 3),
        "bytes_per_token": None if tally.bytes_per_token is None else round(tally.bytes_per_token, 1),
    }


def calibration_error(probs: np.ndarray, agrees: np.ndarray) -> float | None:
    """Return the expected calibration error: the mean difference of probs [N] and truth [N], bin by bin."""
    if len(probs) == 0:
        return None
    bins = np.minimum((probs * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, probs - agrees, BINS)
    return round(float(np.abs(gaps).sum() / len(probs)), 4)


def blocks(tally: Tally) -> list[list[int]]:
    """Return output tokens, steps and draft tokens of groups of consecutive requests, at most `BLOCKS` numbers each."""
    columns = (tally.counts.tokens, tally.counts.steps, tally.counts.drafted)
    return [[int(part.sum()) for part in np.array_split(column, min(BLOCKS, len(column)))] for column in columns]


def row_of(trace: str, candidate: Candidate, cost: float, concurrency: int | str, tally: Tally) -> Row:
    """Return one line of the results."""
    return {
        "trace": trace,
        "drafter": candidate.drafter,
        "setting": candidate.setting,
        "k": candidate.k,
        "shape": candidate.shape,
        "cost": cost,
        "concurrency": concurrency,
        **figures(tally, cost),
    }


def name_of(row: Row) -> str:
    """Return the drafter of a row, with the setting for this project's."""
    return f"ssd {row['setting']}" if row["drafter"] == "ssd" else row["drafter"]


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Return each drafter's row with the largest S, for each concurrency, trace and cost."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["concurrency"], row["trace"], row["cost"], name_of(row))
        if key not in best or row["S"] > best[key]["S"]:
            best[key] = row
    return list(best.values())


def compare(rows: Sequence[Row]) -> list[Row]:
    """Return S of each own setting divided by the best S of each other drafter, by trace, and the geometric mean."""
    best = {(row["concurrency"], row["cost"], name_of(row), row["trace"]): row["S"] for row in best_rows(rows)}
    concurrencies, costs, names, traces = (_distinct(values) for values in zip(*best, strict=True))
    ours = [name for name in names if name.startswith("ssd ")]
    others = [name for name in names if name not in ours]
    compared = []
    for concurrency, cost, own, other in itertools.product(concurrencies, costs, ours, others):
        ratios = {
            trace: best[concurrency, cost, own, trace] / best[concurrency, cost, other, trace] for trace in traces
        }
        compared.append(
            {
                "ssd": own.removeprefix("ssd "),
                "against": other,
                "concurrency": concurrency,
                "cost": cost,
                "by_trace": {trace: round(ratio, 4) for trace, ratio in ratios.items()},
                "geometric_mean": round(float(np.exp(np.mean(np.log(list(ratios.values()))))), 4),
            }
        )
    return compared


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
