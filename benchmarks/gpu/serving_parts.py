"""Parts that serve requests: recorded traffic with and without drafts, drafts that are always rejected, and the GPU
idle time that drafting on the CPU adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from statistics import median
from time import sleep

from benchmarks.gpu.bench import MAX_DRAFT, Bench, Figure
from benchmarks.gpu.requests import Item, Run, Traffic, serve, shortened, traffic, warm_up
from benchmarks.gpu.stepping import MIN_GAP_US, WARM_STEPS, FixedDrafter, Stream, gaps, path, random_requests, span
from benchmarks.support.targets import at_least, at_most
from drafter_service.observability.measuring.rounds import median_of, median_ratio
from drafter_service.observability.measuring.sidecar import running_sidecar
from engine.drafters.registry import build_drafter
from engine.engine import Engine
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.drafter import SuffixDrafter
from ssd.types import Drafter

SPEEDUPS = {1: 2.2, 16: 1.8, 64: 1.3, 256: 1.0}
"""Target speed-ups of `ssd` on recorded traffic, by concurrency."""
REJECTED_SPEED = 0.98
"""Target throughput with drafts that are always rejected, relative to that without drafts."""
REJECTED_PROMPT = 128
"""Largest prompt length with rejected drafts; longer prompts would take most of the time."""
MIN_REJECTED_REQUESTS = 4
MANY_STREAMS = 64
"""Smallest concurrency that is limited to two rounds."""
LEARNING_S = 1.0
"""Time for a sidecar to index learned outputs, in seconds; it takes 25 ms after the end of a request."""
TIMED_STEPS = 16
RATE = attrgetter("rate")
ENDLESS_OUTPUT = (1 + WARM_STEPS + 2 * (1 + TIMED_STEPS)) * (1 + MAX_DRAFT)
"""Output length that no stream reaches in the timed and recorded steps, even if every draft token is accepted. The
model's own tokens follow the recorded ones.
"""
MAX_ADDED_IDLE = {"ssd": 1.0, "ssd-remote": 3.0}
"""Target: GPU idle time added by each drafter, in percent of a step."""


def replay(bench: Bench) -> Iterator[Figure]:
    """Compare `ssd` with `none` on recorded traffic that continues from round to round."""
    for concurrency, count in zip(bench.scale.concurrencies, bench.scale.served, strict=True):
        rounds = bench.scale.rounds if concurrency < MANY_STREAMS else min(2, bench.scale.rounds)
        workload = traffic(bench, count * rounds, concurrency * rounds)
        runs = {name: serve_traffic(bench, name, workload, concurrency, rounds) for name in ("none", "ssd")}
        target = SPEEDUPS.get(concurrency)
        yield Figure(
            f"ssd by none, {concurrency} at a time",
            median_ratio(runs["ssd"], runs["none"], RATE),
            "x",
            len(runs["ssd"]),
            at_least(target) if target else None,
            {**workload.notes, **serving_details(runs, concurrency)},
        )


def rejected(bench: Bench) -> Iterator[Figure]:
    """Compare decoding without drafts to wrong drafts with a high accept_prob, which the token budget has to stop."""
    prompt_tokens = min(REJECTED_PROMPT, bench.scale.context)
    for concurrency in bench.scale.concurrencies:
        count = max(MIN_REJECTED_REQUESTS, concurrency)
        drafters = {"none": NoDrafter(), "rejected": FixedDrafter(path(MAX_DRAFT), bench.config.vocab_size)}
        # Requests without common prefixes.
        requests = [
            random_requests(bench, count, prompt_tokens, bench.scale.output_tokens, seed)
            for seed in range(1 + bench.scale.rounds)
        ]
        warm, *rounds = ([Item(request, number) for number, request in enumerate(each)] for each in requests)
        runs = {
            name: serve_rounds(bench, name, drafter, warm, rounds, concurrency) for name, drafter in drafters.items()
        }
        details = serving_details(runs, concurrency)
        ratio = median_ratio(runs["rejected"], runs["none"], RATE)
        name = f"rejected drafts by none, {concurrency} at a time"
        yield Figure(name, ratio, "x", len(rounds), at_least(REJECTED_SPEED), details)


def serve_traffic(bench: Bench, name: str, workload: Traffic, concurrency: int, rounds: int) -> list[Run]:
    """Serve the requests in several rounds with a drafter that has learned the earlier requests."""
    size = -(-len(workload.served) // rounds)
    parts = [workload.served[first : first + size] for first in range(0, len(workload.served), size)]
    with ExitStack() as stack:
        drafter = warmed_drafter(stack, name, workload)
        # The drafter must not learn the served requests from the warm-up.
        return serve_rounds(bench, name, drafter, workload.learned, parts, concurrency)


def warmed_drafter(stack: ExitStack, name: str, workload: Traffic) -> Drafter:
    """Return a drafter that has learned the earlier requests; its sidecar, if any, runs until `stack` is closed."""
    address = stack.enter_context(running_sidecar()).address if name == "ssd-remote" else ""
    drafter = build_drafter(
        name,
        DrafterConfig(max_draft=MAX_DRAFT),
        address=address,
        warn=lambda text: print(text, flush=True),
    )
    if name != "none":
        warm_up(drafter, workload.learned)
    if isinstance(drafter, SuffixDrafter):
        drafter.corpus.refresh()
    elif name == "ssd-remote":
        sleep(LEARNING_S)
    return drafter


def drafting_engine(bench: Bench, name: str, drafter: Drafter, sequences: int, longest: int) -> Engine:
    """Return an engine for a drafter; for `none`, without steps that have drafts."""
    if name == "none":
        return bench.engine(drafter, sequences, longest, max_draft=0)
    return bench.engine(drafter, sequences, longest, has_budget=True)


def serve_rounds(
    bench: Bench,
    name: str,
    drafter: Drafter,
    warm: Sequence[Item],
    rounds: Sequence[Sequence[Item]],
    concurrency: int,
) -> list[Run]:
    """Serve each round's requests with one new engine and this drafter.

    The requests in `warm` first run for a few tokens, so that the timed rounds neither compile nor allocate.
    """
    longest = max(len(item.request.prompt) + item.request.sampling.max_tokens for item in chain(warm, *rounds))
    with closing(drafting_engine(bench, name, drafter, concurrency, longest)) as engine:
        serve(engine, shortened(warm[:concurrency]), concurrency)
        return [serve(engine, items, concurrency) for items in rounds]


def serving_details(runs: dict[str, list[Run]], concurrency: int) -> dict[str, object]:
    """Return additional figures of the runs, as medians over the rounds."""
    details: dict[str, object] = {}
    for name, own in runs.items():
        details[f"{name}_tokens_per_s"] = round(median_of(own, RATE), 1)
        details[f"{name}_tokens_per_step"] = round(median_of(own, lambda run: run.tokens / run.deliveries), 3)
        details[f"{name}_drafted_per_step"] = round(median_of(own, lambda run: run.drafted / run.deliveries), 3)
        details[f"{name}_overhead_ms"] = round(median_of(own, lambda run: 1e3 * run.overhead(concurrency)), 3)
        details[f"{name}_launched_ahead"] = round(median_of(own, lambda run: run.launched_ahead / len(run.steps)), 3)
        details[f"{name}_draft_share"] = round(median_of(own, lambda run: run.share("draft")), 4)
        details[f"{name}_peak_mib"] = max(run.peak_bytes for run in own) >> 20
    return details


@dataclass(frozen=True)
class DraftingTimes:
    """Median times of the steps of a batch of streams, in microseconds."""

    step_us: float
    drafting_us: float
    """Time of the stage `draft`, measured by the engine."""
    idle_us: float | None
    """The GPU's idle time in gaps between kernels; None without a GPU."""
    launched_ahead: float
    """Fraction of steps that were launched before the results of the previous step were known."""


def drafting(bench: Bench) -> Iterator[Figure]:
    """Measure the GPU idle time that drafting adds to a step on recorded traffic."""
    workload = longest_outputs(traffic(bench, bench.scale.served[-1], 1), bench.scale.streams)
    plain = drafting_times(bench, "none", workload)
    for name, limit in MAX_ADDED_IDLE.items():
        own = drafting_times(bench, name, workload)
        details = {
            "step_us": round(own.step_us),
            "step_without_us": round(plain.step_us),
            "streams": len(workload.served),
        }
        details["launched_ahead"] = round(own.launched_ahead, 3)
        share = 100 * own.drafting_us / own.step_us
        yield Figure(f"drafting with {name}, by the engine's clock", share, "% of a step", TIMED_STEPS, None, details)
        if own.idle_us is not None and plain.idle_us is not None:
            details |= {"idle_us": round(own.idle_us, 1), "idle_without_us": round(plain.idle_us, 1)}
            seen = 100 * (own.idle_us - plain.idle_us) / own.step_us
            name = f"drafting with {name} visible on the GPU's timeline"
            yield Figure(name, seen, "% of a step", 1, at_most(limit), details)


def longest_outputs(workload: Traffic, count: int) -> Traffic:
    """Return the requests with the longest outputs, extended beyond the steps that are measured."""
    chosen = sorted(workload.served, key=lambda item: -item.request.sampling.max_tokens)[:count]
    sampling = [replace(item.request.sampling, max_tokens=ENDLESS_OUTPUT) for item in chosen]
    requests = [replace(item.request, sampling=own) for item, own in zip(chosen, sampling, strict=True)]
    return replace(workload, served=[Item(request, number) for number, request in enumerate(requests)])


def drafting_times(bench: Bench, name: str, workload: Traffic) -> DraftingTimes:
    """Time steps of a new engine with this drafter, then record the kernels of additional steps."""
    longest = max(len(item.request.prompt) for item in workload.served) + ENDLESS_OUTPUT
    with ExitStack() as stack:
        engine = drafting_engine(bench, name, warmed_drafter(stack, name, workload), len(workload.served), longest)
        stack.enter_context(closing(engine))
        stream = Stream(engine, [item.request for item in workload.served])
        seconds, reports = stream.timed(TIMED_STEPS)
        kernels = stream.recorded(TIMED_STEPS) if bench.on_gpu else []
    idle = sum(gap for gap in gaps(kernels) if gap >= MIN_GAP_US) / TIMED_STEPS if span(kernels) else None
    early = sum(report.is_ahead for report in reports) / len(reports)
    return DraftingTimes(1e6 * median(seconds), 1e6 * median(report.times.draft for report in reports), idle, early)
