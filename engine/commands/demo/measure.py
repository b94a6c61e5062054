"""Run the workload without and with drafts, request by request, and summarize the measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from drafter_service.observability.measuring.rounds import Timer, alternated
from engine.commands.demo.outputs import count_loop_tokens
from engine.commands.demo.workload import KINDS, Kind, WorkItem
from engine.engine import Engine
from engine.scheduling.request import Completion, Request

PARTS = 10


@dataclass(frozen=True)
class Measurement:
    """One request, run without and with drafts."""

    kind: Kind
    prompt_tokens: int
    output_tokens: int
    corpus_tokens: int
    """Tokens sent to the drafter for learning before this request."""
    plain_s: float
    drafted_s: float
    steps: int
    """Verify steps with drafts; without drafts there is one per token."""
    drafted: int
    accepted: int
    identical: bool
    loop_tokens: int
    """Output tokens that are part of a loop."""
    task: str = ""
    """As in `WorkItem`."""


def measure(
    items: Sequence[WorkItem],
    requests: Sequence[Request],
    plain: Engine,
    drafting: Engine,
    learned_prompt_tokens: int,
    observe: Callable[[Measurement, Completion], None] = lambda *_: None,
) -> list[Measurement]:
    """Run every item's request with both engines in alternation.

    learned_prompt_tokens: prompt tokens that the drafter remembers per request.
    """
    measurements = []
    corpus_tokens = 0
    rounds = alternated({"plain": partial(_run, plain), "drafted": partial(_run, drafting)}, requests)
    for item, request, results in zip(items, requests, rounds, strict=True):
        (expected, plain_s), (completion, drafted_s) = results["plain"], results["drafted"]
        measurement = Measurement(
            kind=item.kind,
            prompt_tokens=len(request.prompt),
            output_tokens=len(completion.tokens),
            corpus_tokens=corpus_tokens,
            plain_s=plain_s,
            drafted_s=drafted_s,
            steps=completion.steps,
            drafted=completion.drafted,
            accepted=completion.accepted,
            identical=bool(np.array_equal(expected.tokens, completion.tokens)),
            loop_tokens=count_loop_tokens(completion.tokens),
            task=item.task,
        )
        if request.learn:
            separator = 1
            corpus_tokens += min(len(request.prompt), learned_prompt_tokens) + len(completion.tokens) + separator
        measurements.append(measurement)
        observe(measurement, completion)
    return measurements


def _run(engine: Engine, request: Request) -> tuple[Completion, float]:
    with Timer() as timer:
        [completion] = engine.generate([request])
    return completion, timer.wall_s


@dataclass(frozen=True)
class Part:
    """Totals and rates of some requests."""

    requests: int
    new: int
    """Number of these requests that do not repeat an earlier one, exactly or nearly."""
    corpus_tokens: int
    """Tokens remembered before the last of these requests."""
    output_tokens: int
    tokens_per_step: float
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speedup: float
    """Wall-clock time without drafts divided by the time with them."""
    acceptance: float
    """Accepted draft tokens divided by verified ones."""

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> Part:
        """Summarize at least one measurement."""
        output = sum(m.output_tokens for m in measurements)
        plain_s = sum(m.plain_s for m in measurements)
        drafted_s = sum(m.drafted_s for m in measurements)
        return cls(
            requests=len(measurements),
            new=sum(m.kind == "new" for m in measurements),
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
    """Result of the whole workload."""

    identical: bool
    """Whether every output was the same with and without drafts, token by token."""
    differing: tuple[int, ...]
    """Indices of the requests whose outputs differ."""
    tenths: tuple[Part, ...]
    whole: Part
    kinds: dict[Kind, Part]
    """All requests by their kind."""
    tasks: dict[str, Part]
    """Requests with a task, by the kind of the task."""
    loop_share: float
    """Fraction of output tokens that are part of a loop, which any drafter would predict."""


def summarize(measurements: Sequence[Measurement]) -> Summary:
    """Summarize a workload of at least ten requests."""
    count = len(measurements)
    cuts = [round(part * count / PARTS) for part in range(PARTS + 1)]
    tenths = [measurements[start:end] for start, end in pairwise(cuts)]
    by_kind: dict[Kind, list[Measurement]] = {}
    for measurement in sorted(measurements, key=lambda m: KINDS.index(m.kind)):
        by_kind.setdefault(measurement.kind, []).append(measurement)
    by_task: dict[str, list[Measurement]] = {}
    for measurement in sorted(measurements, key=lambda m: m.task):
        if measurement.task:
            by_task.setdefault(measurement.task, []).append(measurement)
    return Summary(
        identical=all(m.identical for m in measurements),
        differing=tuple(index for index, m in enumerate(measurements) if not m.identical),
        tenths=tuple(Part.of(tenth) for tenth in tenths),
        whole=Part.of(measurements),
        kinds={kind: Part.of(of_kind) for kind, of_kind in by_kind.items()},
        tasks={task: Part.of(of_task) for task, of_task in by_task.items()},
        loop_share=sum(m.loop_tokens for m in measurements) / sum(m.output_tokens for m in measurements),
    )
