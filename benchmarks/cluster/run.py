"""The run: one engine alone, two engines, the delay and cost of replication, and faults under load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.cluster.cost import measure_cost
from benchmarks.cluster.engines import Totals, read_totals, sum_of, tokens_per_step
from benchmarks.cluster.faults import FAULTS, Fault
from benchmarks.cluster.learned import SentTexts, measure_delays
from benchmarks.cluster.meter import Meter, Recovery, recovery
from benchmarks.cluster.topology import Cluster, Node, Settings, running_cluster
from benchmarks.cluster.traffic import MIXED_RATE, RATE, ROUND, Traffic, mixed_prompts, round_prompts
from benchmarks.support.targets import at_least, at_most
from drafter_service.observability.measuring.results import machine

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


@dataclass
class Run:
    """A run and its results so far."""

    settings: Settings
    faults: Sequence[str]
    log: Callable[[str], None]
    document: Document = field(default_factory=dict)

    def execute(self) -> Document:
        """Run all parts; return the document."""
        began = time.monotonic()
        self.document = {**machine(), "engine": self.settings.engine}
        self.log("one engine and one sidecar: starting")
        with running_cluster(1, self.settings) as cluster:
            one = self._mixed(cluster)
        self.log("two engines and two sidecars: starting")
        with running_cluster(2, self.settings) as cluster:
            two = self._mixed(cluster)
            self.document["mixed"] = {
                "one": one["tokens_per_step"],
                "two": two["tokens_per_step"],
                "ratio": two["tokens_per_step"] / one["tokens_per_step"],
                "by_engine": two["by_engine"],
                "failed": one["failed"] + two["failed"],
            }
            self.document["processes"] = two["processes"]
            self.document["cost"] = measure_cost(cluster)
            self.log(
                "cost of replication: {cpu_us_per_token} us of processor time per token".format(**self.document["cost"])
            )
            self._repeated(cluster)
        self.document["seconds"] = round(time.monotonic() - began)
        return self.document

    def _mixed(self, cluster: Cluster) -> Document:
        """Send the mixed traffic to the cluster, whose corpora are empty."""
        traffic = Traffic(cluster.router_port, MIXED_RATE)
        before = {process.name: process.usage() for process in cluster.processes}
        began = time.monotonic()
        traffic.run(mixed_prompts())
        seconds = time.monotonic() - began
        totals = {node.name: totals_of(node) for node in cluster.nodes}
        result = {
            "tokens_per_step": tokens_per_step(sum_of([*totals.values()])),
            "by_engine": {name: tokens_per_step(total) for name, total in totals.items()},
            "failed": len(traffic.failures),
            "processes": [
                {
                    "name": process.name,
                    "cores": round((usage.cpu_s - before[process.name].cpu_s) / seconds, 3),
                    "memory_mb": round(usage.memory_bytes / 1e6, 1),
                    "threads": usage.threads,
                    "descriptors": usage.descriptors,
                }
                for process in cluster.processes
                for usage in [process.usage()]
            ],
        }
        self.log(f"mixed traffic: {result['tokens_per_step']:.3f} tokens per step, {result['failed']} failed")
        return result

    def _repeated(self, cluster: Cluster) -> None:
        """Run the repeated traffic, and in it the probes and the faults."""
        meter = Meter([node.port for node in cluster.nodes])
        traffic = Traffic(cluster.router_port, RATE, meter.sample)
        with traffic.running(cycle(round_prompts())):
            wait_for_windows(meter, LEARNING_ROUNDS)
            delays = np.array(measure_delays(cluster.nodes, PROBES)) * 1000
            self.document["delay_ms"] = {
                "p50": round(float(np.percentile(delays, 50)), 1),
                "p99": round(float(np.percentile(delays, 99)), 1),
                "all": np.sort(delays).round(1).tolist(),
            }
            self.log(
                "delay until the other sidecar drafts: p50 {p50} ms, p99 {p99} ms".format(**self.document["delay_ms"])
            )
            self.document["faults"] = [
                self._fault(FAULTS[name](), cluster, traffic, meter, seed) for seed, name in enumerate(self.faults, 2)
            ]
        first = meter.windows[0].began
        self.document["windows"] = [
            {
                "began": round(window.began - first, 1),
                "ended": round(window.ended - first, 1),
                "tokens_per_step": window.tokens_per_step,
                "by_engine": [tokens_per_step(total) for total in window.totals],
            }
            for window in meter.windows
        ]
        for fault in self.document["faults"]:
            for name in {"fault_at", "healed_at"} & fault.keys():
                fault[name] = round(fault[name] - first, 1)
        self.document["requests"] = len(traffic.records)
        self.document["different_outputs"] = sum(record.is_different for record in traffic.records)
        self.document["failed"] = len(traffic.failures)
        self.document["failures"] = traffic.failures[:SHOWN]

    def _fault(self, fault: Fault, cluster: Cluster, traffic: Traffic, meter: Meter, seed: int) -> Document:
        """Cause a fault and return its effects."""
        result: Document = {"name": fault.name, "title": fault.title}
        if obstacle := fault.obstacle(cluster):
            self.log(f"{fault.title}: skipped, {obstacle}")
            return {**result, "skipped": obstacle}
        failed_before, requests_before = len(traffic.failures), len(traffic.records)
        wait_for_windows(meter, BEFORE_ROUNDS)
        sent = SentTexts(cluster.nodes, seed)
        with sent.running():
            time.sleep(1.0)
            fault_at = time.monotonic()
            observed = fault.run(cluster)
            healed_at = time.monotonic()
            seen = await_recovery(meter, fault_at, healed_at)
        lost = sent.lost(SETTLE_S, fault.excuses)
        result |= {
            "fault_at": fault_at,
            "healed_at": healed_at,
            "observed": observed,
            "took_effect": fault.took_effect(observed),
            "requests": len(traffic.records) - requests_before,
            "failed": len(traffic.failures) - failed_before,
            "acknowledged": len(sent.acknowledged),
            "refused": sent.refused,
            "lost": len(lost),
            "lost_texts": [
                f"sidecar {name} does not draft what sidecar {each.node.name} acknowledged "
                f"{each.time - fault_at:.2f} s after the fault began"
                for name, each in lost[:SHOWN]
            ],
            "excused": sum(map(fault.excuses, sent.acknowledged)),
        }
        if seen is not None:
            result |= {**seen._asdict(), "ratio": seen.ratio}
        self.log(f"{fault.title}: {summary(result)}")
        return result


def totals_of(node: Node) -> Totals:
    """Return the totals of a node's engine. Raises SystemExit if it does not answer."""
    totals = read_totals(node.port)
    if totals is None:
        raise SystemExit(f"{node.engine.name} does not answer")
    return totals


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


def wait_for_windows(meter: Meter, number: int) -> None:
    """Wait until the traffic has gone through this number of further rounds. Raises SystemExit if it takes too long."""
    known, until = len(meter.windows), time.monotonic() + ROUNDS_TIMEOUT_S
    while (passed := len(meter.windows) - known) < number:
        if time.monotonic() > until:
            raise SystemExit(
                f"the traffic went through {passed} of {number} rounds within {ROUNDS_TIMEOUT_S:.0f} s; "
                "requests, or the engines' metrics, hang"
            )
        time.sleep(0.1)


def await_recovery(meter: Meter, fault_at: float, healed_at: float) -> Recovery | None:
    """Wait until tokens per step are as before a fault, or for `RECOVERY_S`; return how they changed."""
    until = healed_at + RECOVERY_S + ROUND_S
    seen = None
    while time.monotonic() < until:
        seen = recovery(meter.windows, fault_at, healed_at)
        if seen is not None and seen.seconds is not None:
            break
        time.sleep(0.5)
    return seen


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
