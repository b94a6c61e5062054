"""The rows that the command prints."""

from __future__ import annotations

from collections.abc import Iterable

from drafter_service.commands.advise.advice import Advice, Group, Speedup
from drafter_service.observability.report import units

HEADS = ("drafter", "shape", "max draft", "concurrency", "tokens per step", "drafted", "speed-up")
GROUP_HEADS = ("requests", "number", "share of output", "tokens per step")


def sample_of(advice: Advice) -> str:
    """Return a phrase for the part of the log that the rows of `rows_of` were measured on."""
    return f"the first {units.counted(advice.speedups[0].output_tokens, 'output token')} of this log"


def rows_of(advice: Advice) -> list[tuple[str, ...]]:
    """Return a row for each trial that compares settings, with the columns `HEADS`."""
    return [_cells_of(one) for one in [*advice.speedups, *advice.lengths]]


def _cells_of(one: Speedup) -> tuple[str, ...]:
    return (
        one.drafter,
        "padded" if one.is_padded else one.draft_shape,
        str(one.max_draft),
        str(one.concurrency),
        f"{one.tokens_per_step:.2f}",
        f"{one.drafted_per_step:.1f}",
        f"{one.speedup:.2f}x",
    )


def group_rows(groups: Iterable[Group]) -> list[tuple[str, ...]]:
    """Return a row for each group, with the columns `GROUP_HEADS`."""
    return [
        (group.name, units.count(group.requests), units.share(group.share), units.ratio(group.tokens_per_step))
        for group in groups
    ]
