"""Durations of an engine's steps on given hardware, as a versioned JSON file.

`ssd-engine profile` writes such a file, and `ssd-engine compare` predicts speed-ups from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ssd.budget.curve import PaddingOf, StepCurve, extended
from ssd.budget.padding import NO_PADDING
from ssd.errors import UserError

MAX_SIZES = 64
"""Largest number of sizes of steps."""
VERSION = 1
"""Version of the file's format; it changes when a field is removed or changes its meaning."""
Source = Literal["measured", "roofline"]
_ADVICE = "write one with `ssd-engine profile --out FILE`"


@dataclass(frozen=True)
class CostProfile:
    """Durations of steps and of drafting, in milliseconds.

    The file is a JSON object with the fields of this class and `version`; the numbers that are keys are written as
    strings. A reader ignores fields that it does not know.
    """

    device: str
    """Name of the processor or GPU."""
    model: str
    """Name or size of the target."""
    step_ms: Mapping[int, Mapping[int, float]]
    """`step_ms[tokens][sequences]`: a step without drafting that runs this number of tokens in total, draft tokens
    included, of this number of sequences."""
    drafter_ms: Mapping[str, Mapping[int, Mapping[int, float]]] = field(default_factory=dict)
    """`drafter_ms[drafter][K][sequences]`: the time that drafting adds to a step, by `--drafter` name, draft depth and
    number of sequences. K is 0 for drafters whose depth cannot be set."""
    source: Source = "measured"
    """`roofline`: computed from the bandwidth and the arithmetic throughput of a GPU."""

    def __post_init__(self) -> None:
        """Raise ValueError without any step duration, or for a number that is out of range."""
        if not any(self.step_ms.values()):
            raise ValueError("step_ms is empty")
        if len(self.step_ms) > MAX_SIZES:
            raise ValueError(f"step_ms has {len(self.step_ms)} sizes; the maximum is {MAX_SIZES}")
        if any(ms == 0 for row in self.step_ms.values() for ms in row.values()):
            raise ValueError("a step takes 0 ms")
        for table in (*self.step_ms.values(), *(row for each in self.drafter_ms.values() for row in each.values())):
            if not all(sequences > 0 and np.isfinite(ms) and ms >= 0 for sequences, ms in table.items()):
                raise ValueError("a duration or a number of sequences is out of range")
        if self.source not in get_args(Source):
            raise ValueError(f"source must be one of {', '.join(get_args(Source))}, not {self.source!r}")

    @property
    def label(self) -> str:
        """Return a short description of model and device."""
        source = "from data sheets" if self.source == "roofline" else self.source
        return f"{self.model} on {self.device} ({source})"

    def step(self, tokens: float, sequences: int) -> float:
        """Return the milliseconds of a step of `tokens` tokens in total, interpolated linearly."""
        return 1e3 * float(self.curve().seconds(tokens, sequences))

    def curve(self, padding: PaddingOf = NO_PADDING) -> StepCurve:
        """Return the durations of steps as a curve.

        Pairs that are not in the profile are interpolated and extrapolated by their number of tokens.
        """
        sizes, counts = sorted(self.step_ms), sorted({count for row in self.step_ms.values() for count in row})
        known = [[size for size in sizes if count in self.step_ms[size]] for count in counts]
        seconds = [
            extended(np.array(sizes), own, [self.step_ms[size][count] / 1e3 for size in own])
            for count, own in zip(counts, known, strict=True)
        ]
        return StepCurve.from_table(counts, sizes, np.array(seconds), padding)

    def drafting(self, drafter: str, depth: int, sequences: int) -> float | None:
        """Return the milliseconds that drafting `depth` positions adds to a step, None if they are not known.

        The kinds of a combination `A+B` are added up if it is not in the profile itself; unknown kinds count as 0.
        """
        if drafter not in self.drafter_ms:
            kinds = drafter.split("+")
            parts = [
                ms for kind in kinds if kind != drafter and (ms := self.drafting(kind, depth, sequences)) is not None
            ]
            return sum(parts) if parts else None
        of_depth = {
            each: float(np.interp(sequences, sorted(row), [row[count] for count in sorted(row)]))
            for each, row in sorted(self.drafter_ms[drafter].items())
        }
        return of_depth[0] if 0 in of_depth else float(extended(depth, [0, *of_depth], [0, *of_depth.values()]))

    @property
    def max_sequences(self) -> int:
        """Return the largest number of sequences whose steps are in the profile."""
        return max(sequences for row in self.step_ms.values() for sequences in row)

    @property
    def prompt_token_ms(self) -> float:
        """Return the milliseconds that a token of a prompt takes: its share of the largest step of the profile."""
        tokens = max(size for size, row in self.step_ms.items() if row)
        return min(self.step_ms[tokens].values()) / tokens

    def speedup(
        self,
        tokens_per_step: float,
        drafted_per_step: float,
        drafting_ms: float,
        sequences: int,
    ) -> float:
        """Return the speed-up over plain decoding, as derived in docs/drafters.md.

        tokens_per_step, drafted_per_step: mean over the steps of a sequence. drafting_ms: time that drafting adds to a
        step.
        """
        plain = self.step(sequences, sequences)
        drafted = self.step(sequences * (1 + drafted_per_step), sequences) + drafting_ms
        return plain / drafted * tokens_per_step

    def write(self, path: Path) -> None:
        """Write the file. Raises UserError if that is not possible."""
        try:
            path.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        except OSError as problem:
            raise UserError(f"cannot write {path}: {problem.strerror}; give another file") from None

    @classmethod
    def read(cls, path: Path) -> CostProfile:
        """Read a file. Raises UserError if it is not a profile of a known version."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            reason = getattr(problem, "strerror", None) or problem
            raise UserError(f"cannot read {path}: {reason}; {_ADVICE}") from None
        try:
            if document["version"] != VERSION:
                raise UserError(
                    f"{path} has version {document['version']}; this program reads version {VERSION}; {_ADVICE}"
                )
            return cls(
                device=str(document["device"]),
                model=str(document["model"]),
                step_ms=_numbers(document["step_ms"]),
                drafter_ms={str(name): _numbers(table) for name, table in document["drafter_ms"].items()},
                source=document.get("source", "measured"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            what = f"{problem} is missing" if isinstance(problem, KeyError) else problem
            raise UserError(f"{path} is not a cost profile: {what}; {_ADVICE}") from None


def _numbers(table: Any) -> dict[int, dict[int, float]]:
    return {int(outer): {int(inner): float(ms) for inner, ms in row.items()} for outer, row in table.items()}
