"""Ratios that are always numbers or None, and the figures of drafting made of totals."""

from __future__ import annotations

import math
from collections.abc import Iterable

from drafter_service.observability.report.schema import Drafting, Estimate

COSTS = (0.005, 0.02, 0.05, 0.1)
"""From small batches on a large GPU to large batches, or a CPU."""


def ratio(part: float, whole: float) -> float | None:
    """`part / whole`; None of nothing, and of so little that the ratio is beyond all numbers."""
    value = part / whole if whole > 0 else math.inf
    return max(0.0, value) if math.isfinite(value) else None


def share(part: float, whole: float) -> float | None:
    """`ratio`, 1 at most: counters that are read while they grow may be ahead of one another."""
    value = ratio(part, whole)
    return None if value is None else min(1.0, value)


def finite(value: float) -> float:
    """`value` if it is a number at all, else 0."""
    return float(value) if math.isfinite(value) else 0.0


def drafting_of(steps: int, committed: int, hits: int, drafted: int, accepted: int) -> Drafting:
    """The figures that follow from these totals; ones below 0 count as 0."""
    steps, committed, hits, drafted, accepted = (max(0, total) for total in (steps, committed, hits, drafted, accepted))
    saved = max(0, committed - steps) if steps else 0
    tokens_per_step, drafted_per_step = ratio(committed, steps), ratio(drafted, steps)
    estimates = []
    if tokens_per_step is not None and drafted_per_step is not None:
        estimates = [Estimate(cost=cost, speedup=tokens_per_step / (1.0 + cost * drafted_per_step)) for cost in COSTS]
    return Drafting(
        steps=steps,
        committed=committed,
        hits=hits,
        drafted=drafted,
        accepted=accepted,
        saved_steps=saved,
        saved_share=share(saved, committed) if steps else None,
        hit_rate=share(hits, steps),
        acceptance=share(accepted, drafted),
        tokens_per_step=tokens_per_step,
        drafted_per_step=drafted_per_step,
        break_even_cost=ratio(saved, drafted) if steps else None,
        estimates=estimates,
    )


def total_of(parts: Iterable[Drafting]) -> Drafting:
    """Of several namespaces together."""
    totals = [(part.steps, part.committed, part.hits, part.drafted, part.accepted) for part in parts]
    return drafting_of(*(sum(column) for column in zip(*totals, strict=True))) if totals else drafting_of(0, 0, 0, 0, 0)
