"""Run two engines with two sidecars that share what they learn, and cause faults: `python -m benchmarks.cluster`.

Requests go to the engines in turn, and to the other one if an engine does not answer. Mixed traffic is sent to one
engine alone and then to two. Then the cost and the delay of replication are measured, and faults are caused under
repeated traffic. The page cluster.html and the document cluster.json are written to --out; the document is also the
last line of the output. The exit code is 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.faults import FAULTS
from benchmarks.cluster.nodes import Cluster, add_options, check_options, in_background, running_cluster
from benchmarks.cluster.texts import SentTexts, measure_cost, measure_delays
from benchmarks.cluster.traffic import (
    MIXED_RATE,
    RATE,
    ROUND,
    Meter,
    Recovery,
    Traffic,
    all_prompts,
    mixed_prompts,
    read_totals,
    recovery,
    tokens_per_step,
)
from benchmarks.support.command import new_parser
from benchmarks.support.targets import at_least, at_most, conclude
from drafter_service.observability.measuring.results import machine

FIXED_COST = ("--capacity", "1M", "--set", "drafting.cost=0.02")
"""Arguments of sidecars. With a fixed cost the lengths of drafts do not depend on measured step times."""
PROBES = 120
LEARNING_ROUNDS = 4
"""Rounds until the repeated traffic has been learned, and until durations of steps are known."""
BEFORE_ROUNDS = 3
RECOVERY_S = 60.0
SETTLE_S = 20.0
"""Longest time after the recovery until every acknowledged text must be drafted by both sidecars."""
ROUND_S = ROUND / RATE
ROUNDS_TIMEOUT_S = 300.0
"""Longest wait for some rounds, each of which takes `ROUND_S` unless requests hang."""
MIN_RATIO = 0.97
"""Target for tokens per step of two engines, relative to one engine that gets all of the traffic."""
MAX_DELAY_MS = 100
"""Target for the 99th percentile of the delay until a sidecar drafts what the other one has learned."""
SHOWN = 20
"""Failures, and lost texts of a fault, that the document names."""

Document = dict[str, Any]
BEGAN = time.monotonic()


def main() -> None:
    """Run the benchmark."""
    parser = new_parser("cluster", __doc__)
    add_options(parser, Path("build/cluster"))
    parser.add_argument("--only", default=",".join(FAULTS), help=f"faults to cause ({','.join(FAULTS)}); '' for none")
    options = parser.parse_args()
    faults = [name for name in options.only.split(",") if name]
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")

    from benchmarks.cluster.page import render_page

    check_options(options)
    document = run(options, faults)
    document["targets"] = targets(document)
    conclude("cluster", document, render_page(document), options.out)


def log(text: str) -> None:
    """Print progress."""
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {text}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace, faults: Sequence[str]) -> Document:
    """Run all parts; return the document."""
    log("one engine and one sidecar: starting")
    with running_cluster(1, options, *FIXED_COST) as cluster:
        one = run_mixed(cluster)
    log("two engines and two sidecars: starting")
    with running_cluster(2, options, *FIXED_COST) as cluster:
        two = run_mixed(cluster)
        cost = measure_cost(cluster)
        log(f"cost of replication: {cost['cpu_us_per_token']} us of processor time per token")
        repeated = run_repeated(cluster, faults)
    mixed = {
        "one": one["tokens_per_step"],
        "two": two["tokens_per_step"],
        "ratio": two["tokens_per_step"] / one["tokens_per_step"],
        "by_engine": two["by_engine"],
        "failed": one["failed"] + two["failed"],
    }
    return {
        **machine(),
        "engine": options.engine,
        "mixed": mixed,
        "processes": two["processes"],
        "cost": cost,
        **repeated,
        "seconds": round(time.monotonic() - BEGAN),
    }


def run_mixed(cluster: Cluster) -> Document:
    """Send the mixed traffic to the cluster, whose corpora are empty."""
    traffic = Traffic(cluster.engine_ports, MIXED_RATE)
    before = {process.name: process.usage() for process in cluster.processes}
    began = time.monotonic()
    traffic.run(mixed_prompts(), threading.Event())
    seconds = time.monotonic() - began
    after = {process.name: process.usage() for process in cluster.processes}
    totals = {node.name: read_totals(node.port) for node in cluster.nodes}
    if missing := [name for name, total in totals.items() if total is None]:
        raise SystemExit(f"engine {', '.join(missing)} does not answer")
    mean = tokens_per_step(np.array([*totals.values()]))
    if mean is None:
        raise SystemExit("the engines made no tokens")
    log(f"mixed traffic: {mean:.3f} tokens per step, {len(traffic.failures)} failed")
    return {
        "tokens_per_step": mean,
        "by_engine": {name: tokens_per_step(total) for name, total in totals.items()},
        "failed": len(traffic.failures),
        "processes": [
            {
                "name": name,
                "cores": round((usage.cpu_s - before[name].cpu_s) / seconds, 3),
                "memory_mb": round(usage.memory_bytes / 1e6, 1),
                "threads": usage.threads,
                "descriptors": usage.descriptors,
            }
            for name, usage in after.items()
        ],
    }


def run_repeated(cluster: Cluster, faults: Sequence[str]) -> Document:
    """Send the repeated traffic, and in it the probes and the faults."""
    meter = Meter(cluster.engine_ports)
    traffic = Traffic(cluster.engine_ports, RATE, meter.sample)
    with in_background(lambda stopping: traffic.run(cycle(all_prompts()[:ROUND]), stopping)):
        wait_for_rounds(meter, LEARNING_ROUNDS)
        delays = np.array(measure_delays(cluster.nodes, PROBES)) * 1000
        p50, p99 = (round(float(value), 1) for value in np.percentile(delays, (50, 99)))
        log(f"delay until the other sidecar drafts: p50 {p50} ms, p99 {p99} ms")
        effects = [cause(name, cluster, traffic, meter, seed) for seed, name in enumerate(faults, 2)]
    first = meter.times[0]
    for fault in effects:
        for name in {"fault_at", "healed_at"} & fault.keys():
            fault[name] = round(fault[name] - first, 1)
    return {
        "delay_ms": {"p50": p50, "p99": p99, "all": np.sort(delays).round(1).tolist()},
        "faults": effects,
        "windows": [
            {
                "began": round(began - first, 1),
                "ended": round(ended - first, 1),
                "tokens_per_step": tokens_per_step(later - earlier),
                "by_engine": [tokens_per_step(total) for total in later - earlier],
            }
            for (began, earlier), (ended, later) in pairwise(zip(meter.times, meter.totals, strict=True))
        ],
        "requests": len(traffic.records),
        "different_outputs": sum(record.is_different for record in traffic.records),
        "failed": len(traffic.failures),
        "failures": traffic.failures[:SHOWN],
    }


def cause(name: str, cluster: Cluster, traffic: Traffic, meter: Meter, seed: int) -> Document:
    """Cause a fault and return its effects."""
    fault = FAULTS[name]
    result: Document = {"name": name, "title": fault.title}
    if obstacle := fault.obstacle(cluster):
        log(f"{fault.title}: skipped, {obstacle}")
        return {**result, "skipped": obstacle}
    failed_before, requests_before = len(traffic.failures), len(traffic.records)
    wait_for_rounds(meter, BEFORE_ROUNDS)
    sent = SentTexts(cluster.nodes, seed)
    with in_background(sent.run):
        time.sleep(1.0)
        fault_at = time.monotonic()
        outcome = fault.run(cluster)
        healed_at = time.monotonic()
        seen = await_recovery(meter, fault_at, healed_at)
    lost = sent.lost(SETTLE_S, outcome.excuses)
    result |= {
        "fault_at": fault_at,
        "healed_at": healed_at,
        "observed": outcome.observed,
        "took_effect": outcome.took_effect,
        "requests": len(traffic.records) - requests_before,
        "failed": len(traffic.failures) - failed_before,
        "acknowledged": len(sent.acknowledged),
        "refused": sent.refused,
        "lost": len(lost),
        "lost_texts": [
            f"sidecar {other} does not draft what sidecar {each.node.name} acknowledged "
            f"{each.time - fault_at:.2f} s after the fault began"
            for other, each in lost[:SHOWN]
        ],
        "excused": sum(map(outcome.excuses, sent.acknowledged)),
        **({} if seen is None else seen._asdict()),
    }
    log(f"{fault.title}: {summary(result)}")
    return result


def summary(fault: Document) -> str:
    """Return the effects of a fault in one line."""
    before, lowest, after = (fault.get(name, 0.0) for name in ("before", "lowest", "after"))
    recovered = "not recovered" if fault.get("seconds") is None else f"after {fault['seconds']:.0f} s"
    effect = "" if fault["took_effect"] else "; the fault had no effect"
    return (
        f"{fault['failed']} of {fault['requests']} requests failed, {fault['lost']} of {fault['acknowledged']} texts "
        f"lost, tokens per step {before:.2f}, then {lowest:.2f}, then {after:.2f} ({recovered}); "
        f"{fault['observed']}{effect}"
    )


def wait_for_rounds(meter: Meter, number: int) -> None:
    """Wait until the traffic has gone through this number of further rounds. Raises SystemExit if it takes too long."""
    wanted = max(1, len(meter.times)) + number
    if not wait_until(lambda: len(meter.times) >= wanted, ROUNDS_TIMEOUT_S):
        raise SystemExit(
            f"the traffic did not go through {number} rounds within {ROUNDS_TIMEOUT_S:.0f} s; "
            "requests, or the engines' metrics, hang"
        )


def await_recovery(meter: Meter, fault_at: float, healed_at: float) -> Recovery | None:
    """Wait until tokens per step are as before a fault, or for `RECOVERY_S`; return how they changed."""

    def seen() -> Recovery | None:
        return recovery(meter.times, meter.totals, fault_at, healed_at)

    wait_until(lambda: (now := seen()) is not None and now.seconds is not None, RECOVERY_S + ROUND_S)
    return seen()


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; return whether it was met in time."""
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def targets(document: Document) -> list[Document]:
    """Return the targets, and whether the run has reached them."""
    faults = [fault for fault in document["faults"] if "skipped" not in fault]
    recoveries = [fault.get("seconds") for fault in faults]
    longest = max((seconds for seconds in recoveries if seconds is not None), default=0)
    failed = document["failed"] + document["mixed"]["failed"]
    return [
        at_least(MIN_RATIO).row("tokens per step of two engines / of one", document["mixed"]["ratio"]),
        at_most(MAX_DELAY_MS).row("delay until the other sidecar drafts, p99, ms", document["delay_ms"]["p99"]),
        at_most(0).row("failed requests", failed),
        at_most(0).row("outputs that differ from the first one of their prompt", document["different_outputs"]),
        at_most(0).row("acknowledged texts lost", sum(fault["lost"] for fault in faults)),
        at_most(0).row("faults without effect", sum(not fault["took_effect"] for fault in faults)),
        at_most(0).row("faults without recovery within a minute", recoveries.count(None)),
        at_most(RECOVERY_S).row("longest recovery of tokens per step after a fault, s", longest),
    ]


if __name__ == "__main__":
    main()
