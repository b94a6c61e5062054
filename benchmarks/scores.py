"""From what happened in a replay to figures, and from figures to a comparison of drafters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.contestants import Entry

BINS = 10
"""Of the expected calibration error, equally wide."""
COLD_SHARE = 0.1
"""Part of the output tokens after which a drafter should know what its odds are worth."""

Row = dict[str, Any]


@dataclass
class Tally:
    """What happened in one replay."""

    output_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    """Of single sequences."""
    drafted: int = 0
    accepted: int = 0
    path_odds: list[float] = field(default_factory=list)
    """Of every drafted token."""
    agrees: list[bool] = field(default_factory=list)
    """Whether its whole path was the output; beside `path_odds`."""
    cold_tokens: int = 0
    """How many of those were drafted before `COLD_SHARE` of the output."""
    has_odds: bool = False
    draft_s: list[float] = field(default_factory=list)
    """Of each draft call: seconds for each of its sequences."""
    insert_s: float = 0.0
    """In all other calls."""
    bytes_per_token: float | None = None


def figures(tally: Tally, cost: float) -> Row:
    """A replay's figures if each drafted token costs `cost` of a step."""
    tokens_per_step = tally.output_tokens / tally.steps
    drafted_per_step = tally.drafted / tally.steps
    p50, p99 = np.percentile(np.array(tally.draft_s) * 1e6, [50, 99])
    odds, agrees = np.array(tally.path_odds), np.array(tally.agrees, bool)
    return {
        "output_tokens": tally.output_tokens,
        "steps": tally.steps,
        "tokens_per_step": round(tokens_per_step, 4),
        "drafted_per_step": round(drafted_per_step, 4),
        "accept_rate": round(tally.accepted / tally.drafted, 4) if tally.drafted else None,
        "S": round(tokens_per_step / (1 + cost * drafted_per_step), 4),
        "ece": calibration_error(odds[tally.cold_tokens :], agrees[tally.cold_tokens :]) if tally.has_odds else None,
        "ece_all": calibration_error(odds, agrees) if tally.has_odds else None,
        "draft_us_p50": round(float(p50), 2),
        "draft_us_p99": round(float(p99), 2),
        "insert_us_per_token": round(tally.insert_s * 1e6 / (tally.prompt_tokens + tally.output_tokens), 3),
        "bytes_per_token": None if tally.bytes_per_token is None else round(tally.bytes_per_token, 1),
    }


def calibration_error(odds: np.ndarray, agrees: np.ndarray) -> float | None:
    """Expected calibration error: how far odds [N] and truth [N] are apart in a bin, averaged over what was drafted."""
    if len(odds) == 0:
        return None
    bins = np.minimum((odds * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, odds - agrees, BINS)
    return round(float(np.abs(gaps).sum() / len(odds)), 4)


def row_of(trace: str, entry: Entry, cost: float, inflight: int, tally: Tally) -> Row:
    """One line of the results."""
    return {
        "trace": trace,
        "drafter": entry.drafter,
        "setting": entry.setting,
        "k": entry.k,
        "shape": entry.shape,
        "cost": cost,
        "inflight": inflight,
        **figures(tally, cost),
    }


def contender(row: Row) -> str:
    """What a row stands for in a comparison: ours as it is set; of another drafter the best of its settings."""
    return f"ssd {row['setting']}" if row["drafter"] == "ssd" else row["drafter"]


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Of each contender the row with the largest S, for each number in flight, trace and cost."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["inflight"], row["trace"], row["cost"], contender(row))
        if key not in best or row["S"] > best[key]["S"]:
            best[key] = row
    return list(best.values())


def compare(rows: Sequence[Row]) -> list[Row]:
    """S of each setting of ours divided by the best S of each other drafter, by trace, and the geometric mean."""
    best = {(row["inflight"], row["cost"], contender(row), row["trace"]): row["S"] for row in best_rows(rows)}
    inflights, costs, contenders, traces = (_distinct(values) for values in zip(*best, strict=True))
    ours = [name for name in contenders if name.startswith("ssd ")]
    others = [name for name in contenders if name not in ours]
    compared = []
    for inflight, cost, own, other in itertools.product(inflights, costs, ours, others):
        ratios = {trace: best[inflight, cost, own, trace] / best[inflight, cost, other, trace] for trace in traces}
        compared.append(
            {
                "ssd": own.removeprefix("ssd "),
                "against": other,
                "inflight": inflight,
                "cost": cost,
                "by_trace": {trace: round(ratio, 4) for trace, ratio in ratios.items()},
                "geometric_mean": round(float(np.exp(np.mean(np.log(list(ratios.values()))))), 4),
            }
        )
    return compared


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
