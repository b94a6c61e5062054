"""Run two engines with two sidecars that share what they learn, and cause faults: `python -m benchmarks.cluster`.

Requests go to the engines in turn, and to the other one if an engine does not answer. Mixed traffic is sent to one
engine alone and then to two. Then the cost and the delay of replication are measured, and faults are caused under
repeated traffic:

    sidecar, redis, engine    kill -9 of the first sidecar, of Redis, of the first engine; each starts again
    partition                 Redis is stopped (SIGSTOP), so that connections to it hang, and continued
    disk                      files of the first sidecar may not grow (RLIMIT_FSIZE) while it saves a snapshot
    clock                     the clock of the second sidecar is set forward and back by an hour

The results are written to --out, and are the last line of the output. The exit code is 1 if a target was missed.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.cluster.nodes import (
    CALL_TIMEOUT_S,
    Cluster,
    Node,
    check_options,
    cluster_parser,
    in_background,
    running_cluster,
)
from benchmarks.cluster.texts import Acknowledged, SentTexts, measure_cost, measure_delays
from benchmarks.cluster.traffic import (
    MIXED_RATE,
    Traffic,
    all_prompts,
    mixed_prompts,
)
from benchmarks.support import report, say, target
from drafter_service.observability.measuring.results import machine
from drafter_service.observability.pages.tables import markdown_table
from drafter_service.stubs import drafter_pb2 as pb

FIXED_COST = ("--capacity", "1M", "--set", "drafting.cost=0.02")
"""Arguments of sidecars. With a fixed cost the lengths of drafts do not depend on measured step times."""
PROBES = 120
ROUND, RATE = 41, 8.0
"""Prompts of a round of the repeated traffic, and requests per second: half of a core for engines that have learned it.
The number is odd, so that each engine gets each prompt in turn.
"""
LEARNING_ROUNDS, BEFORE_ROUNDS, AFTER_ROUNDS = 4, 3, 2
"""Rounds until the repeated traffic has been learned; rounds before a fault, with which those after it are compared;
consecutive rounds after it that together must be as before, since single ones vary.
"""
TOLERANCE = 0.02
RECOVERY_S = 60.0
SETTLE_S = 20.0
"""Longest time after the recovery until every acknowledged text must be drafted by both sidecars."""
MIN_RATIO, MAX_DELAY_MS = 0.97, 100
"""Targets: tokens per step of two engines, relative to one engine that gets all of the traffic; 99th percentile of the
delay until a sidecar drafts what the other one has learned.
"""
SHOWN = 20
"""Failures, and lost texts of a fault, that the document names."""
DOWN_S = 3.0
"""Seconds from a kill to the start of the same process, as of a supervisor."""
PARTITION_S = 12.0
"""More than the 10 s after which a sidecar gives up a call to Redis."""
FULL_DISK_BYTES = 1 << 16
"""Size that files may have while the disk is full: more than a log of warnings has, and less than a snapshot."""
JUMPS_S, JUMP_HELD_S, CLOCK_TOLERANCE_S = (0, 3600, -3600, 0), 5.0, 2
"""Offsets of the clock that jumps, in this order; the time of each; age that a report may have when it is read."""
CLOCK_SOURCE, CLOCK_VARIABLE = Path(__file__).with_name("clock.c"), "SSD_CLOCK_OFFSET"
PUBLISHING_S = 0.1
"""A text is published some milliseconds after it was acknowledged; one that was so just before a kill may be lost."""

Document = dict[str, Any]


def main() -> None:
    """Run the benchmark."""
    parser = cluster_parser("cluster", __doc__)
    parser.add_argument("--only", default=",".join(FAULTS), help=f"faults to cause ({','.join(FAULTS)}); '' for none")
    options = parser.parse_args()
    faults = [name for name in options.only.split(",") if name]
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    if "clock" in faults and not shutil.which("cc"):
        parser.error("the fault clock needs a C compiler; choose others with --only")
    check_options(options)
    began = time.monotonic()
    say("one engine and one sidecar: starting")
    with running_cluster(1, options, *FIXED_COST) as cluster:
        one = run_mixed(cluster)
    say("two engines and two sidecars: starting")
    with running_cluster(2, options, *FIXED_COST) as cluster:
        two = run_mixed(cluster)
        cost = measure_cost(cluster)
        repeated = run_repeated(cluster, faults)
    mixed = {"one": one["tokens_per_step"], "two": two["tokens_per_step"]}
    mixed |= {"ratio": mixed["two"] / mixed["one"], "failed": one["failed"] + two["failed"]}
    document = {**machine(), "engine": options.engine, "mixed": mixed, "processes": two["processes"], "cost": cost}
    document |= {**repeated, "seconds": round(time.monotonic() - began)}
    for rows in (document["processes"], document["faults"]):
        if rows:
            heads = [name for name in rows[0] if name not in ("lost_texts", "observed")]
            print(markdown_table(heads, [[shown(row[name]) for name in heads] for row in rows]))
    print(f"tokens per step: {mixed}\ndelay, ms: {document['delay_ms']}\ncost: {cost}")
    report({**document, "targets": targets(document)}, options.out)


def shown(value: object) -> str:
    """Return a cell of a table."""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def run_mixed(cluster: Cluster) -> Document:
    """Send the mixed traffic to the cluster, whose corpora are empty."""
    traffic = Traffic(cluster.engine_ports, MIXED_RATE)
    before, began = [process.usage() for process in cluster.processes], time.monotonic()
    mean = traffic.run(mixed_prompts())
    seconds = time.monotonic() - began
    if not mean:
        raise SystemExit("the engines made no tokens")
    say(f"mixed traffic: {mean:.3f} tokens per step, {len(traffic.failures)} failed")
    rows = []
    for process, earlier in zip(cluster.processes, before, strict=True):
        usage = process.usage()
        row = {"process": process.name, "cores": (usage.cpu_s - earlier.cpu_s) / seconds}
        rows.append({**row, "memory_mb": usage.memory_bytes / 1e6, **usage._asdict()})
        del rows[-1]["cpu_s"], rows[-1]["memory_bytes"]
    return {"tokens_per_step": mean, "failed": len(traffic.failures), "processes": rows}


def run_repeated(cluster: Cluster, faults: Sequence[str]) -> Document:
    """Send the repeated traffic, and in it the probes and the faults."""
    traffic, prompts = Traffic(cluster.engine_ports, RATE), all_prompts()[:ROUND]
    for _ in range(LEARNING_ROUNDS):
        traffic.run(prompts)
    with in_background(lambda stopping: traffic.run(cycle(prompts), stopping)):
        delays = np.array(measure_delays(cluster.nodes, PROBES)) * 1000
    p50, p99 = (round(float(value), 1) for value in np.percentile(delays, (50, 99)))
    say(f"delay until the other sidecar drafts: p50 {p50} ms, p99 {p99} ms")
    effects = [cause(name, cluster, traffic, prompts, seed) for seed, name in enumerate(faults, 2)]
    return {
        "delay_ms": {"p50": p50, "p99": p99},
        "faults": effects,
        "requests": len(traffic.records),
        "different_outputs": sum(record.is_different for record in traffic.records),
        "failed": len(traffic.failures),
        "failures": traffic.failures[:SHOWN],
    }


def cause(name: str, cluster: Cluster, traffic: Traffic, prompts: Sequence[str], seed: int) -> Document:
    """Cause a fault and return its effects."""
    failed_before, requests_before = len(traffic.failures), len(traffic.records)
    before = np.mean([traffic.run(prompts) for _ in range(BEFORE_ROUNDS)])
    sent, rates, recovered_s = SentTexts(cluster.nodes, seed), [], None
    with in_background(sent.run), ThreadPoolExecutor(1) as pool:
        time.sleep(1.0)
        fault_at = time.monotonic()
        fault = pool.submit(lambda: (*FAULTS[name](cluster), time.monotonic()))
        while not fault.done():
            rates.append(traffic.run(prompts))
        took_effect, observed, healed_at = fault.result()
        last = len(rates)
        while recovered_s is None and time.monotonic() < healed_at + RECOVERY_S:
            rates.append(traffic.run(prompts))
            after = np.mean(rates[last:][-AFTER_ROUNDS:])
            if len(rates) - last >= AFTER_ROUNDS and after >= (1 - TOLERANCE) * before:
                recovered_s = round(time.monotonic() - healed_at, 1)

    def is_excused(text: Acknowledged) -> bool:
        # The time is from before the kill, which takes a moment. The sidecar starts again after `DOWN_S` at least.
        is_killed = name == "sidecar" and text.node is cluster.nodes[0]
        return is_killed and -DOWN_S < fault_at - text.time < PUBLISHING_S

    lost = sent.lost(SETTLE_S, is_excused)
    effects = {
        "fault": name,
        "seconds": round(healed_at - fault_at, 1),
        "requests": len(traffic.records) - requests_before,
        "failed": len(traffic.failures) - failed_before,
        "acknowledged": len(sent.acknowledged),
        "refused": sent.refused,
        "lost": len(lost),
        "before": float(before),
        "lowest": min(rates),
        "after": float(after),
        "recovered_s": recovered_s,
        "took_effect": took_effect,
        "observed": observed,
        "lost_texts": [
            f"sidecar {other} does not draft what sidecar {each.node.name} acknowledged "
            f"{each.time - fault_at:.2f} s after the fault began"
            for other, each in lost[:SHOWN]
        ],
    }
    say(f"{effects}")
    return effects


# --- The faults. Each is caused and ended; returned are whether it took effect, and what was observed.


def stop_redis(cluster: Cluster) -> tuple[bool, object]:
    """Stop Redis for a while. The kernel accepts connections and bytes meanwhile, as in a network partition."""
    cluster.redis.process.send_signal(signal.SIGSTOP)
    time.sleep(PARTITION_S)
    status = cluster.redis.process.status()
    cluster.redis.process.send_signal(signal.SIGCONT)
    return status == "stopped", status


def fill_disk(cluster: Cluster) -> tuple[bool, object]:
    """Ask the first sidecar for snapshots before, while and after its files may not grow."""
    node = cluster.nodes[0]
    pid = node.sidecar.process.pid
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    before = is_saved(node)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, most))
    full = is_saved(node)
    time.sleep(DOWN_S)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
    after = is_saved(node)
    return before and not full and after, {"saved_before": before, "saved_while_full": full, "saved_after": after}


def is_saved(node: Node) -> bool:
    """Ask for a snapshot; return whether it was saved."""
    with node.stub() as stub:
        try:
            stub.Snapshot(pb.SnapshotRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return True


def move_clock(cluster: Cluster) -> tuple[bool, object]:
    """Start the second sidecar with a clock that can be set; set it forward, back, and right. It keeps that clock."""
    library, clock, node = cluster.folder / "clock.so", cluster.folder / "clock", cluster.nodes[1]
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(CLOCK_SOURCE)], check=True)
    clock.write_bytes(struct.pack("q", 0))
    node.sidecar.environment |= {"LD_PRELOAD": str(library), CLOCK_VARIABLE: str(clock)}
    node.sidecar.end()  # It saves its namespaces.
    node.sidecar.start()
    node.sidecar.await_ready()
    seen = []
    # Written in place, because the sidecar has mapped the file.
    with clock.open("r+b", buffering=0) as file:
        for jump in JUMPS_S:
            os.pwrite(file.fileno(), struct.pack("q", jump), 0)
            time.sleep(JUMP_HELD_S)
            # By how many seconds the sidecar's clock is ahead of this one's.
            seen.append(round(node.report()["taken_at"] - time.time()))
    return all(abs(ahead - jump) <= CLOCK_TOLERANCE_S for ahead, jump in zip(seen, JUMPS_S, strict=True)), seen


FAULTS: dict[str, Callable[[Cluster], tuple[bool, object]]] = {
    "sidecar": lambda cluster: (True, cluster.nodes[0].sidecar.restart(DOWN_S)),
    "redis": lambda cluster: (True, cluster.redis.restart(DOWN_S)),
    "engine": lambda cluster: (True, cluster.nodes[0].engine.restart(DOWN_S)),
    "partition": stop_redis,
    "disk": fill_disk,
    "clock": move_clock,
}


def targets(document: Document) -> list[Document]:
    """Return the targets, and whether the run has reached them."""
    recoveries = [fault["recovered_s"] for fault in document["faults"]]
    longest = max((seconds for seconds in recoveries if seconds is not None), default=0)
    failed = document["failed"] + document["mixed"]["failed"]
    return [
        target("tokens per step of two engines / of one", document["mixed"]["ratio"], "at least", MIN_RATIO),
        target("delay until the other sidecar drafts, p99, ms", document["delay_ms"]["p99"], "at most", MAX_DELAY_MS),
        target("failed requests", failed, "at most", 0),
        target("outputs that differ from the first one of their prompt", document["different_outputs"], "at most", 0),
        target("acknowledged texts lost", sum(fault["lost"] for fault in document["faults"]), "at most", 0),
        target("faults without effect", sum(not fault["took_effect"] for fault in document["faults"]), "at most", 0),
        target("faults without recovery within a minute", recoveries.count(None), "at most", 0),
        target("longest recovery of tokens per step after a fault, s", longest, "at most", RECOVERY_S),
    ]


if __name__ == "__main__":
    main()
