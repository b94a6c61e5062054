"""Compute figures from the tallies of replays, and compare drafters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.support.drafters import Entry

BINS = 10
"""Number of bins of the expected calibration error, of equal width."""
COLD_SHARE = 0.1
"""Fraction of the output tokens that is left out of `ece`."""

Row = dict[str, Any]


@dataclass
class Tally:
    """Counts of one replay."""

    output_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    """Steps of single sequences."""
    drafted: int = 0
    accepted: int = 0
    path_probs: list[float] = field(default_factory=list)
    """Path probability of each draft token."""
    agrees: list[bool] = field(default_factory=list)
    """Whether the whole path of each draft token is in the output; parallel to `path_probs`."""
    cold_tokens: int = 0
    """Number of these tokens that were drafted before `COLD_SHARE` of the output."""
    has_probs: bool = False
    draft_s: list[float] = field(default_factory=list)
    """Seconds per sequence of each draft call."""
    insert_s: float = 0.0
    """Seconds of all other calls."""
    bytes_per_token: float | None = None


def figures(tally: Tally, cost: float) -> Row:
    """Return a replay's figures if each draft token costs `cost` of a step."""
    tokens_per_step = tally.output_tokens / tally.steps
    drafted_per_step = tally.drafted / tally.steps
    p50, p99 = np.percentile(np.array(tally.draft_s) * 1e6, [50, 99])
    probs, agrees = np.array(tally.path_probs), np.array(tally.agrees, bool)
    return {
        "output_tokens": tally.output_tokens,
        "steps": tally.steps,
        "tokens_per_step": round(tokens_per_step, 4),
        "drafted_per_step": round(drafted_per_step, 4),
        "accept_rate": round(tally.accepted / tally.drafted, 4) if tally.drafted else None,
        "S": round(tokens_per_step / (1 + cost * drafted_per_step), 4),
        "ece": calibration_error(probs[tally.cold_tokens :], agrees[tally.cold_tokens :]) if tally.has_probs else None,
        "ece_all": calibration_error(probs, agrees) if tally.has_probs else None,
        "draft_us_p50": round(float(p50), 2),
        "draft_us_p99": round(float(p99), 2),
        "insert_us_per_token": round(tally.insert_s * 1e6 / (tally.prompt_tokens + tally.output_tokens), 3),
        "bytes_per_token": None if tally.bytes_per_token is None else round(tally.bytes_per_token, 1),
    }


def calibration_error(probs: np.ndarray, agrees: np.ndarray) -> float | None:
    """Return the expected calibration error: the mean difference of probs [N] and truth [N], bin by bin."""
    if len(probs) == 0:
        return None
    bins = np.minimum((probs * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, probs - agrees, BINS)
    return round(float(np.abs(gaps).sum() / len(probs)), 4)


def row_of(trace: str, entry: Entry, cost: float, concurrency: int, tally: Tally) -> Row:
    """Return one line of the results."""
    return {
        "trace": trace,
        "drafter": entry.drafter,
        "setting": entry.setting,
        "k": entry.k,
        "shape": entry.shape,
        "cost": cost,
        "concurrency": concurrency,
        **figures(tally, cost),
    }


def candidate_of(row: Row) -> str:
    """Return the candidate of a row: drafter and setting for this project's drafters, the drafter alone for others."""
    return f"ssd {row['setting']}" if row["drafter"] == "ssd" else row["drafter"]


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Return each candidate's row with the largest S, for each concurrency, trace and cost."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["concurrency"], row["trace"], row["cost"], candidate_of(row))
        if key not in best or row["S"] > best[key]["S"]:
            best[key] = row
    return list(best.values())


def compare(rows: Sequence[Row]) -> list[Row]:
    """Return S of each own setting divided by the best S of each other drafter, by trace, and the geometric mean."""
    best = {(row["concurrency"], row["cost"], candidate_of(row), row["trace"]): row["S"] for row in best_rows(rows)}
    concurrencies, costs, candidates, traces = (_distinct(values) for values in zip(*best, strict=True))
    ours = [name for name in candidates if name.startswith("ssd ")]
    others = [name for name in candidates if name not in ours]
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
