"""From measurements to figures: by tenth of the workload, and overall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.commands.demo.measure import Measurement
from engine.commands.demo.workload import KINDS, Kind

PARTS = 10


@dataclass(frozen=True)
class Part:
    """Some requests, taken together."""

    requests: int
    repeat_share: float
    """Share of the requests that repeat an earlier one, exactly or nearly."""
    corpus_tokens: int
    """Remembered before its last request."""
    output_tokens: int
    tokens_per_step: float
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speedup: float
    """Wall-clock time without drafts over the time with them."""
    acceptance: float
    """Accepted draft tokens over verified ones."""

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> Part:
        """The figures of at least one measurement."""
        output = sum(m.output_tokens for m in measurements)
        plain_s = sum(m.plain_s for m in measurements)
        drafted_s = sum(m.drafted_s for m in measurements)
        return cls(
            requests=len(measurements),
            repeat_share=sum(m.kind != "new" for m in measurements) / len(measurements),
            corpus_tokens=measurements[-1].corpus_tokens,
            output_tokens=output,
            tokens_per_step=output / sum(m.steps for m in measurements),
            plain_tokens_per_s=output / plain_s,
            drafted_tokens_per_s=output / drafted_s,
            speedup=plain_s / drafted_s,
            acceptance=sum(m.accepted for m in measurements) / max(1, sum(m.drafted for m in measurements)),
        )


@dataclass(frozen=True)
class Summary:
    """What the workload showed."""

    identical: bool
    """Whether every output was the same with and without drafts, token by token."""
    differing: tuple[int, ...]
    """Indices of the requests whose outputs differ."""
    tenths: tuple[Part, ...]
    whole: Part
    kinds: dict[Kind, Part]
    """The whole workload by kind of request."""
    last_tenth_new: Part | None
    """The new requests of the last tenth alone; None if it has none."""
    loop_share: float
    """Share of output tokens that are part of a loop, which any drafter would find."""

    @property
    def last_tenth(self) -> Part:
        """The part in which the corpus was fullest."""
        return self.tenths[-1]


def summarise(measurements: Sequence[Measurement]) -> Summary:
    """The figures of a workload of at least ten requests."""
    count = len(measurements)
    cuts = [round(part * count / PARTS) for part in range(PARTS + 1)]
    tenths = [measurements[start:end] for start, end in pairwise(cuts)]
    by_kind: dict[Kind, list[Measurement]] = {}
    for measurement in sorted(measurements, key=lambda m: KINDS.index(m.kind)):
        by_kind.setdefault(measurement.kind, []).append(measurement)
    new = [m for m in tenths[-1] if m.kind == "new"]
    return Summary(
        identical=all(m.identical for m in measurements),
        differing=tuple(index for index, m in enumerate(measurements) if not m.identical),
        tenths=tuple(Part.of(tenth) for tenth in tenths),
        whole=Part.of(measurements),
        kinds={kind: Part.of(of_kind) for kind, of_kind in by_kind.items()},
        last_tenth_new=Part.of(new) if new else None,
        loop_share=sum(m.loop_tokens for m in measurements) / sum(m.output_tokens for m in measurements),
    )
