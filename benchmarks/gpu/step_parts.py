"""Parts that time steps: ceilings, start, plain decoding, verification, trees, many streams without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from statistics import median
from time import perf_counter

import torch

from benchmarks.gpu.bench import CEILING_TRIES, MAX_DRAFT, Bench, Figure, SkippedError
from benchmarks.gpu.shapes import step_bytes, step_seconds
from benchmarks.gpu.stepping import (
    MIN_GAP_US,
    FixedDrafter,
    Interval,
    binary_tree,
    by_name,
    idle_share,
    path,
    ratios,
    span,
    time_steps,
)
from benchmarks.support.targets import at_least, at_most
from ssd.baselines.none import NoDrafter

RECORDED_STEPS = 20
TREE_NODES = 32
IDLE_CONTEXT = 256
"""Context length of engines that run no sequences."""
CAPTURE_S = 60.0
"""Target for capturing at an engine's start, in seconds."""


def ceilings(bench: Bench) -> Iterator[Figure]:
    """Measure the ceilings of the device, to which other figures are compared."""
    reached = bench.ceilings
    yield Figure("copy bandwidth, read and write", reached.bytes_per_s / 1e9, "GB/s", CEILING_TRIES)
    size = bench.scale.product
    yield Figure(f"matrix product {size} x {size} x {size}", reached.flops_per_s / 1e12, "TFLOP/s", CEILING_TRIES)


def start(bench: Bench) -> Iterator[Figure]:
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
    yield Figure(name, seconds, "s", 1, at_most(CAPTURE_S), details)


def decode(bench: Bench) -> Iterator[Figure]:
    """Compare the bandwidth of one stream without drafts to that of a copy."""
    context = bench.scale.context
    timed = time_steps(bench, {"none": NoDrafter()}, 1, context, max_draft=0, recorded=RECORDED_STEPS)["none"]
    step, count = median(chain(*timed.rounds)), sum(map(len, timed.rounds))
    read = step_bytes(bench.config, [context], 1, bench.dtype.itemsize)
    share = 100 * read / step / bench.ceilings.bytes_per_s
    details = {
        "tokens_per_s": round(1 / step, 1),
        "step_ms": round(1e3 * step, 3),
        "gb_read": round(read / 1e9, 3),
        "copy_gb_per_s": round(bench.ceilings.bytes_per_s / 1e9, 1),
    }
    yield Figure(f"bandwidth of a step, {context} tokens before it", share, "%", count, at_least(85), details)
    if timed.kernels:
        yield from idle_figures(timed.kernels)


def idle_figures(kernels: list[Interval]) -> Iterator[Figure]:
    """Yield the fraction of time in which the GPU is idle between steps, with each kernel's share of the time."""
    details = {
        "idle_with_all_gaps_%": round(100 * idle_share(kernels), 2),
        "recorded_ms": round(span(kernels) / 1e3, 2),
        "kernels": by_name(kernels),
    }
    name = f"GPU idle between steps, gaps of {MIN_GAP_US:g} us or more"
    yield Figure(name, 100 * idle_share(kernels, MIN_GAP_US), "%", 1, at_most(2), details)


def verify(bench: Bench) -> Iterator[Figure]:
    """Compare steps that verify 16 wrong draft tokens to steps without drafts."""
    wrong = FixedDrafter(path(MAX_DRAFT), bench.config.vocab_size)
    timed = time_steps(bench, {"plain": NoDrafter(), "verify": wrong}, 1, bench.scale.context)
    ratio = median(ratios(timed["verify"], timed["plain"]))
    results = [report.arrays for report in timed["verify"].reports]
    details: dict[str, object] = {f"{name}_ms": round(1e3 * median(own.medians), 3) for name, own in timed.items()}
    details["draft_tokens"] = min(int(each.depths.min()) for each in results)
    details["accepted"] = max(int(each.accepted.max()) for each in results)
    details["steps_a_round"] = bench.scale.steps
    yield Figure("verify of 16 draft tokens, by a plain step", ratio, "x", bench.scale.rounds, at_most(1.10), details)


def trees(bench: Bench) -> Iterator[Figure]:
    """Compare steps that verify a wrong draft tree to steps that verify a wrong path of equal size."""
    shapes = {"path": path(TREE_NODES), "tree": binary_tree(TREE_NODES)}
    drafters = {name: FixedDrafter(parents, bench.config.vocab_size) for name, parents in shapes.items()}
    timed = time_steps(bench, drafters, 1, bench.scale.long_context, max_draft=TREE_NODES, shape="tree")
    ratio = median(ratios(timed["tree"], timed["path"]))
    details = {f"{name}_ms": round(1e3 * median(own.medians), 3) for name, own in timed.items()}
    name = f"a tree of {TREE_NODES} nodes at {bench.scale.long_context} tokens, by a path of {TREE_NODES}"
    yield Figure(name, ratio, "x", bench.scale.rounds, at_most(1.05), details)


def streams(bench: Bench) -> Iterator[Figure]:
    """Compare steps of many streams without drafts to the estimate from bytes and operations."""
    count, context = bench.scale.streams, bench.scale.context
    timed = time_steps(bench, {"none": NoDrafter()}, count, context, max_draft=0)["none"]
    measured, steps = median(chain(*timed.rounds)), sum(map(len, timed.rounds))
    seconds = step_seconds(bench.config, [context] * count, 1, bench.dtype.itemsize, bench.ceilings)
    expected, bound = sum(seconds), max(seconds)
    details = {
        "step_ms": round(1e3 * measured, 3),
        "estimate_ms": round(1e3 * expected, 3),
        "bound_ms": round(1e3 * bound, 3),
        "tokens_per_s": round(count / measured, 1),
        "peak_mib": torch.cuda.max_memory_allocated() >> 20 if bench.on_gpu else None,
    }
    name = f"a step of {count} streams, {context} tokens before each, by bandwidth + compute"
    yield Figure(name, measured / expected, "x", steps, at_most(1.10), details)
