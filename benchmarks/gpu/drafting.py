"""Part about drafting on the CPU: how much of it can be seen on the GPU's timeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.figures import Figure, at_most
from benchmarks.gpu.served import drafting_engine, taught_drafter
from benchmarks.gpu.stepping import Stream
from benchmarks.gpu.timeline import LEAST_GAP_US, gaps, span
from benchmarks.gpu.traffic import Traffic, traffic
from benchmarks.requests import Item

STEPS = 16
ROOM = 512
"""Output tokens that no stream reaches in those steps; behind the recorded ones the model goes on by itself."""
VISIBLE = {"ssd": 1.0, "ssd-remote": 3.0}
"""Percent of a step that drafting may add to the GPU's waiting."""


@dataclass(frozen=True)
class Waiting:
    """Of a batch of streams, a step; microseconds."""

    step_us: float
    drafting_us: float
    """That the engine's own clock gives to drafting."""
    idle_us: float | None
    """In which the GPU waits in gaps; None without one."""
    begun_early: float
    """Share of steps that were begun before the one before them was known."""


def drafting(bench: Bench) -> Iterator[Figure]:
    """Recorded traffic in one batch: how much longer the GPU waits in a step with drafts than in one without."""
    asked = longest_outputs(traffic(bench, bench.scale.served[-1], 1), bench.scale.streams)
    plain = waiting(bench, "none", asked)
    for name, limit in VISIBLE.items():
        own = waiting(bench, name, asked)
        details = {"step_us": round(own.step_us), "step_without_us": round(plain.step_us), "streams": len(asked.served)}
        details["begun_early"] = round(own.begun_early, 3)
        share = 100 * own.drafting_us / own.step_us
        yield Figure(f"drafting with {name}, by the engine's clock", share, "% of a step", STEPS, None, details)
        if own.idle_us is not None and plain.idle_us is not None:
            details |= {"idle_us": round(own.idle_us, 1), "idle_without_us": round(plain.idle_us, 1)}
            seen = 100 * (own.idle_us - plain.idle_us) / own.step_us
            name = f"drafting with {name} visible on the GPU's timeline"
            yield Figure(name, seen, "% of a step", 1, at_most(limit), details)


def longest_outputs(asked: Traffic, count: int) -> Traffic:
    """The requests with the longest outputs, each going on for longer than it is watched."""
    chosen = sorted(asked.served, key=lambda item: -item.request.sampling.max_tokens)[:count]
    return replace(asked, served=[endless(item, number) for number, item in enumerate(chosen)])


def endless(item: Item, session: int) -> Item:
    """The same request with room for more output."""
    sampling = replace(item.request.sampling, max_tokens=ROOM)
    return replace(item, request=replace(item.request, sampling=sampling), session=session)


def waiting(bench: Bench, name: str, asked: Traffic) -> Waiting:
    """A new engine with this drafter, watched for some steps and then recorded for some more."""
    longest = max(len(item.request.prompt) for item in asked.served) + ROOM
    with ExitStack() as stack:
        engine = drafting_engine(bench, name, taught_drafter(stack, bench, name, asked), len(asked.served), longest)
        stack.enter_context(closing(engine))
        stream = Stream(engine, [item.request for item in asked.served])
        seconds, reports = stream.timed(STEPS)
        kernels = stream.recorded(STEPS) if bench.on_gpu else []
    idle = sum(gap for gap in gaps(kernels) if gap >= LEAST_GAP_US) / STEPS if span(kernels) else None
    early = sum(report.is_ahead for report in reports) / len(reports)
    return Waiting(1e6 * median(seconds), 1e6 * median(report.times.draft for report in reports), idle, early)
