"""The parts of the GPU benchmark. Each yields rows, see `benchmarks.gpu.bench.figure`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from operator import attrgetter
from statistics import median
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.gpu.bench import CEILING_TRIES, MAX_DRAFT, Bench, SkippedError, figure, step_bytes, step_flops
from benchmarks.gpu.requests import Item, Run, learn, replay_items, serve
from benchmarks.gpu.stepping import (
    MIN_GAP_US,
    WARM_STEPS,
    FixedDrafter,
    Stream,
    binary_tree,
    by_name,
    gaps,
    idle_share,
    path,
    random_requests,
    ratios,
    span,
    time_steps,
)
from benchmarks.support import Row
from drafter_service.observability.measuring.rounds import median_of, median_ratio
from drafter_service.observability.measuring.sidecar import running_sidecar
from engine.drafters.registry import build_drafter
from engine.engine import Engine
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.drafter import SuffixDrafter
from ssd.replay import Recording
from ssd.types import Drafter

RECORDED_STEPS = 20
TREE_NODES = 32
IDLE_CONTEXT = 256
"""Context length of engines that run no sequences."""
CAPTURE_S = 60.0
"""Target for capturing at an engine's start, in seconds."""
SPEEDUPS = {1: 2.2, 16: 1.8, 64: 1.3, 256: 1.0}
"""Target speed-ups of `ssd` on recorded traffic, by concurrency."""
REJECTED_SPEED = 0.98
"""Target throughput with drafts that are always rejected, relative to that without drafts."""
REJECTED_PROMPT = 128
"""Largest prompt length with rejected drafts; longer prompts would take most of the time."""
MIN_REJECTED_REQUESTS = 4
MANY_STREAMS = 64
"""Smallest concurrency that is limited to two rounds."""
WARM_UP_TOKENS = 8
LEARNING_S = 1.0
"""Time for a sidecar to index learned outputs, in seconds; it takes 25 ms after the end of a request."""
TIMED_STEPS = 16
ENDLESS_OUTPUT = (1 + WARM_STEPS + 2 * (1 + TIMED_STEPS)) * (1 + MAX_DRAFT)
"""Output length that no stream reaches in the timed and recorded steps, even if every draft token is accepted."""
MAX_ADDED_IDLE = {"ssd": 1.0, "ssd-remote": 3.0}
"""Target: GPU idle time added by each drafter, in percent of a step."""


def ceilings(bench: Bench) -> Iterator[Row]:
    """Measure the ceilings of the device, to which other figures are compared."""
    reached = bench.ceilings
    yield figure("copy bandwidth, read and write", reached.bytes_per_s / 1e9, "GB/s", CEILING_TRIES)
    size = bench.scale.product
    yield figure(f"matrix product {size} x {size} x {size}", reached.flops_per_s / 1e12, "TFLOP/s", CEILING_TRIES)


def start(bench: Bench) -> Iterator[Row]:
    """Time the capture of all graphs of the largest engine, after a smaller engine has compiled all kernels."""
    if not bench.on_gpu:
        raise SkippedError("graphs are captured on a CUDA device")
    streams = max(bench.scale.concurrencies)
    for sequences in (1, streams):
        began = perf_counter()
        with closing(bench.engine(NoDrafter(), sequences, IDLE_CONTEXT, has_budget=True)) as engine:
            graphs, seconds = engine.captured
            whole = perf_counter() - began
    details = {"graphs": graphs, "ms_a_graph": round(1e3 * seconds / graphs, 1), "whole_start_s": round(whole, 2)}
    details |= {"peak_mib": torch.cuda.max_memory_allocated() >> 20}
    name = f"capturing the graphs of {streams} streams, drafts of up to {MAX_DRAFT}"
    yield figure(name, seconds, "s", 1, ("at most", CAPTURE_S), details)


def decode(bench: Bench) -> Iterator[Row]:
    """Compare the bandwidth of one stream without drafts to that of a copy."""
    context = bench.scale.context
    timed = time_steps(bench, {"none": NoDrafter()}, 1, context, max_draft=0, recorded=RECORDED_STEPS)["none"]
    step, count = median(chain(*timed.rounds)), sum(map(len, timed.rounds))
    read = step_bytes(bench.config, context, 1, bench.dtype.itemsize)
    share = 100 * read / step / bench.ceilings.bytes_per_s
    details = {
        "tokens_per_s": round(1 / step, 1),
        "step_ms": round(1e3 * step, 3),
        "gb_read": round(read / 1e9, 3),
        "copy_gb_per_s": round(bench.ceilings.bytes_per_s / 1e9, 1),
    }
    yield figure(f"bandwidth of a step, {context} tokens before it", share, "%", count, ("at least", 85), details)
    if kernels := timed.kernels:
        details = {
            "idle_with_all_gaps_%": round(100 * idle_share(kernels), 2),
            "recorded_ms": round(span(kernels) / 1e3, 2),
            "kernels": by_name(kernels),
        }
        name = f"GPU idle between steps, gaps of {MIN_GAP_US:g} us or more"
        yield figure(name, 100 * idle_share(kernels, MIN_GAP_US), "%", 1, ("at most", 2), details)


def verify(bench: Bench) -> Iterator[Row]:
    """Compare steps that verify 16 wrong draft tokens to steps without drafts."""
    wrong = FixedDrafter(path(MAX_DRAFT), bench.config.vocab_size)
    timed = time_steps(bench, {"plain": NoDrafter(), "verify": wrong}, 1, bench.scale.context)
    ratio = median(ratios(timed["verify"], timed["plain"]))
    results = [report.arrays for report in timed["verify"].reports]
    details: dict[str, object] = {f"{name}_ms": round(1e3 * median(own.medians), 3) for name, own in timed.items()}
    details["draft_tokens"] = min(int(each.depths.min()) for each in results)
    details["accepted"] = max(int(each.accepted.max()) for each in results)
    details["steps_a_round"] = bench.scale.steps
    yield figure(
        "verify of 16 draft tokens, by a plain step", ratio, "x", bench.scale.rounds, ("at most", 1.10), details
    )


def trees(bench: Bench) -> Iterator[Row]:
    """Compare steps that verify a wrong draft tree to steps that verify a wrong path of equal size."""
    shapes = {"path": path(TREE_NODES), "tree": binary_tree(TREE_NODES)}
    drafters = {name: FixedDrafter(parents, bench.config.vocab_size) for name, parents in shapes.items()}
    timed = time_steps(bench, drafters, 1, bench.scale.long_context, max_draft=TREE_NODES, shape="tree")
    ratio = median(ratios(timed["tree"], timed["path"]))
    details = {f"{name}_ms": round(1e3 * median(own.medians), 3) for name, own in timed.items()}
    name = f"a tree of {TREE_NODES} nodes at {bench.scale.long_context} tokens, by a path of {TREE_NODES}"
    yield figure(name, ratio, "x", bench.scale.rounds, ("at most", 1.05), details)


def streams(bench: Bench) -> Iterator[Row]:
    """Compare steps of many streams without drafts to the estimate from bytes and operations."""
    count, context = bench.scale.streams, bench.scale.context
    timed = time_steps(bench, {"none": NoDrafter()}, count, context, max_draft=0)["none"]
    measured, steps = median(chain(*timed.rounds)), sum(map(len, timed.rounds))
    # The sum is the time of a step that does not overlap loading and computing; the larger is a bound for any kernel.
    loading = step_bytes(bench.config, context, count, bench.dtype.itemsize) / bench.ceilings.bytes_per_s
    computing = step_flops(bench.config, context, count) / bench.ceilings.flops_per_s
    expected, bound = loading + computing, max(loading, computing)
    details = {
        "step_ms": round(1e3 * measured, 3),
        "estimate_ms": round(1e3 * expected, 3),
        "bound_ms": round(1e3 * bound, 3),
        "tokens_per_s": round(count / measured, 1),
        "peak_mib": torch.cuda.max_memory_allocated() >> 20 if bench.on_gpu else None,
    }
    name = f"a step of {count} streams, {context} tokens before each, by bandwidth + compute"
    yield figure(name, measured / expected, "x", steps, ("at most", 1.10), details)


# --- Parts that serve requests


def replay(bench: Bench) -> Iterator[Row]:
    """Compare `ssd` with `none` on recorded traffic that continues from round to round."""
    for concurrency, count in zip(bench.scale.concurrencies, bench.scale.served, strict=True):
        rounds = bench.scale.rounds if concurrency < MANY_STREAMS else min(2, bench.scale.rounds)
        learned, served, notes = traffic(bench, count * rounds, concurrency * rounds)
        size = -(-len(served) // rounds)
        parts = [served[first : first + size] for first in range(0, len(served), size)]
        runs = {}
        for name in ("none", "ssd"):
            with ExitStack() as stack:
                drafter = taught_drafter(stack, name, learned)
                # The drafter must not learn the served requests from the warm-up.
                runs[name] = serve_rounds(bench, name, drafter, learned, parts, concurrency)
        goal = ("at least", SPEEDUPS[concurrency]) if concurrency in SPEEDUPS else None
        ratio = median_ratio(runs["ssd"], runs["none"], attrgetter("rate"))
        details = {**notes, **serving_details(runs, concurrency)}
        yield figure(f"ssd by none, {concurrency} at a time", ratio, "x", len(runs["ssd"]), goal, details)


def rejected(bench: Bench) -> Iterator[Row]:
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
        ratio = median_ratio(runs["rejected"], runs["none"], attrgetter("rate"))
        name, details = f"rejected drafts by none, {concurrency} at a time", serving_details(runs, concurrency)
        yield figure(name, ratio, "x", len(rounds), ("at least", REJECTED_SPEED), details)


def drafting(bench: Bench) -> Iterator[Row]:
    """Measure the GPU idle time that drafting adds to a step on recorded traffic."""
    learned, served, _ = traffic(bench, bench.scale.served[-1], 1)
    served = sorted(served, key=lambda item: -item.request.sampling.max_tokens)[: bench.scale.streams]
    longest = [item.with_sampling(max_tokens=ENDLESS_OUTPUT) for item in served]
    plain = drafting_times(bench, "none", learned, longest)
    for name, limit in MAX_ADDED_IDLE.items():
        own = drafting_times(bench, name, learned, longest)
        details = {
            "step_us": round(own["step_us"]),
            "step_without_us": round(plain["step_us"]),
            "streams": len(longest),
            "launched_ahead": round(own["launched_ahead"], 3),
        }
        share = 100 * own["drafting_us"] / own["step_us"]
        yield figure(f"drafting with {name}, by the engine's clock", share, "% of a step", TIMED_STEPS, None, details)
        if "idle_us" in own and "idle_us" in plain:
            details |= {"idle_us": round(own["idle_us"], 1), "idle_without_us": round(plain["idle_us"], 1)}
            seen = 100 * (own["idle_us"] - plain["idle_us"]) / own["step_us"]
            name = f"drafting with {name} visible on the GPU's timeline"
            yield figure(name, seen, "% of a step", 1, ("at most", limit), details)


def traffic(bench: Bench, count: int, concurrent: int) -> tuple[list[Item], list[Item], Row]:
    """Return requests of the trace that drafters learn, `count` that are served, and facts about them.

    concurrent: number of requests that run at once, summed over the rounds. With fewer than two conversations for each
    of them, turns do not wait for earlier ones, because that would lower the concurrency. Raises SkippedError without a
    trace.
    """
    path, scale = bench.options.trace, bench.scale
    if not path.exists():
        raise SkippedError(f"no recorded traffic at {path}; give --trace FILE.npz")
    try:
        trace = Recording.load(path)
    except ValueError as error:
        raise SkippedError(str(error)) from None
    short = np.flatnonzero(trace.prompt_lengths <= scale.prompt_tokens)
    learned = min(scale.learned, len(short) // 2)
    chosen = trace.take(short[: learned + count])
    if len(chosen) <= learned:
        raise SkippedError(f"{trace.name} has no requests with prompts of at most {scale.prompt_tokens} tokens")
    items, is_renumbered = replay_items(chosen, scale.prompt_tokens, scale.output_tokens, bench.config.vocab_size)
    served = items[learned:]
    if apart := len({item.session for item in served}) < 2 * concurrent:
        served = [item._replace(session=number) for number, item in enumerate(served)]
    notes: Row = {
        "trace": trace.name,
        "requests": len(served),
        "output_tokens": sum(item.request.sampling.max_tokens for item in served),
        "seen_before": learned,
        "renumbered": is_renumbered,
        "turns_wait_for_each_other": not apart,
    }
    return items[:learned], served, notes


def taught_drafter(stack: ExitStack, name: str, learned: Sequence[Item]) -> Drafter:
    """Return a drafter that has learned the earlier requests; its sidecar, if any, runs until `stack` is closed."""
    address = stack.enter_context(running_sidecar()).address if name == "ssd-remote" else ""
    config = DrafterConfig(max_draft=MAX_DRAFT)
    drafter = build_drafter(name, config, address=address, warn=lambda text: print(text, flush=True))
    if name != "none":
        learn(drafter, learned)
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
    bench: Bench, name: str, drafter: Drafter, warm: Sequence[Item], rounds: Sequence[Sequence[Item]], concurrency: int
) -> list[Run]:
    """Serve each round's requests with one new engine and this drafter.

    The requests in `warm` first run for a few tokens, so that the timed rounds neither compile nor allocate.
    """
    longest = max(len(item.request.prompt) + item.request.sampling.max_tokens for item in chain(warm, *rounds))
    short = [item.with_sampling(max_tokens=WARM_UP_TOKENS) for item in warm[:concurrency]]
    with closing(drafting_engine(bench, name, drafter, concurrency, longest)) as engine:
        serve(engine, short, concurrency)
        return [serve(engine, items, concurrency) for items in rounds]


def serving_details(runs: Mapping[str, list[Run]], concurrency: int) -> Row:
    """Return additional figures of the runs, as medians over the rounds."""
    details: Row = {}
    for name, own in runs.items():
        details[f"{name}_tokens_per_s"] = round(median_of(own, attrgetter("rate")), 1)
        details[f"{name}_tokens_per_step"] = round(median_of(own, lambda run: run.tokens / run.deliveries), 3)
        details[f"{name}_drafted_per_step"] = round(median_of(own, lambda run: run.drafted / run.deliveries), 3)
        details[f"{name}_overhead_ms"] = round(median_of(own, lambda run: 1e3 * run.overhead(concurrency)), 3)
        details[f"{name}_launched_ahead"] = round(median_of(own, lambda run: run.launched_ahead / len(run.steps)), 3)
        details[f"{name}_draft_share"] = round(median_of(own, attrgetter("draft_share")), 4)
        details[f"{name}_peak_mib"] = max(run.peak_bytes for run in own) >> 20
    return details


def drafting_times(bench: Bench, name: str, learned: Sequence[Item], served: Sequence[Item]) -> dict[str, float]:
    """Return median times of steps with this drafter: of a step, of its stage `draft`, and on a GPU idle time.

    Kernels of further steps are recorded for the idle time in gaps between kernels. launched_ahead: fraction of steps
    that were launched before the results of the previous step were known.
    """
    longest = max(len(item.request.prompt) for item in served) + ENDLESS_OUTPUT
    with ExitStack() as stack:
        engine = drafting_engine(bench, name, taught_drafter(stack, name, learned), len(served), longest)
        stack.enter_context(closing(engine))
        stream = Stream(engine, [item.request for item in served])
        seconds, reports = stream.timed(TIMED_STEPS)
        kernels = stream.recorded(TIMED_STEPS) if bench.on_gpu else []
    times = {
        "step_us": 1e6 * median(seconds),
        "drafting_us": 1e6 * median(report.times.draft for report in reports),
        "launched_ahead": sum(report.is_ahead for report in reports) / len(reports),
    }
    if span(kernels):
        times["idle_us"] = sum(gap for gap in gaps(kernels) if gap >= MIN_GAP_US) / TIMED_STEPS
    return times


class Part(NamedTuple):
    """A question that the benchmark answers."""

    title: str
    limit_s: int
    """Time limit, extended by the time that earlier parts did not use; figures reported before it are kept."""
    run: Callable[[Bench], Iterator[Row]]


PARTS = {
    "ceilings": Part("copy bandwidth and matrix products", 20, ceilings),
    "start": Part("capturing CUDA graphs for the most streams that are served", 30, start),
    "decode": Part("plain decoding of one stream, against the bandwidth; GPU idle between steps", 30, decode),
    "verify": Part("verifying 16 draft tokens, against a plain step", 35, verify),
    "trees": Part("a tree of 32 nodes at 32k tokens, against a path", 45, trees),
    "replay": Part("ssd against none on recorded traffic", 90, replay),
    "rejected": Part("drafts that are always rejected, against none", 40, rejected),
    "drafting": Part("CPU drafting on the GPU's timeline, embedded and remote", 40, drafting),
    "streams": Part("64 streams without drafts, against the estimate", 25, streams),
}
"""Parts in the order in which they run: 355 seconds in total, 9 minutes with the tests that need a GPU."""
