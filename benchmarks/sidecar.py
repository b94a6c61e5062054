"""Measure a sidecar: what it adds to a step, how many drafts several engines get from it, and what sharing text costs.

    python -m benchmarks.sidecar [--parts steps,engines,log] [--corpus 1000000] [--out FILE]

`steps` compares steps over a Unix socket with the same steps of an embedded drafter, and of a replica of the sidecar's
corpus in this process, in alternated blocks. `engines` compares the drafts per second of several engines, each in a
process of its own, with those of one; each asks again as soon as it has drafts. `log` lets one of two sidecars with a
shared log learn text, and measures processor time and network traffic per token, and the delay until the other one
drafts a text; it needs redis-server. Engines are simulated and text is synthetic; the services are the real ones. The
last line of the output is one JSON document.
"""

from __future__ import annotations

import multiprocessing
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

import ssd
from benchmarks.support import cpu_seconds, list_of, new_parser, positive, report, say
from benchmarks.support.load import (
    CORPUS_SEED,
    ENGINE_SEED,
    LONG_DEADLINE_S,
    Feed,
    SimulatedEngine,
    Writer,
    client_of,
    fill,
)
from drafter_service.observability.measuring.rounds import alternated, columns, median_of, median_ratio
from drafter_service.observability.measuring.sidecar import running_sidecar
from ssd.config import DrafterConfig

BATCH = 64
BLOCKS, BLOCK_STEPS = 9, 200
ENGINE_COUNTS, ENGINE_ROUNDS, ENGINE_STEPS = (1, 2, 4), 3, 6000
WARM_UP_STEPS = 50
WAIT_S = 0.01
"""Interval at which the progress of a replica is read."""
FEED_TOKENS_PER_S, FEED_S, CATCH_UP_S = 200_000, 8.0, 1.0
"""Text that one of two sidecars learns, and the time after it in which the other one must have read it."""
PROBES, PROBE_TOKENS, PROBE_INTERVAL_S = 120, 24, 0.05
"""Texts whose delay is measured, one after another. They have no token in common."""

Results = dict[str, float]


@contextmanager
def filled_sidecar(corpus_tokens: int) -> Iterator[str]:
    """Run a sidecar whose corpus is full, and yield its address."""
    with running_sidecar("--capacity", str(corpus_tokens)) as sidecar:
        fill(sidecar.address, Writer(CORPUS_SEED).take(corpus_tokens))
        yield sidecar.address


def measure_steps(corpus_tokens: int) -> Results:
    """Compare steps over a Unix socket with those of an embedded drafter and of a replica that have the same corpus."""
    from drafter_service.client.replica import ReplicaClient  # It imports numba.

    corpus = ssd.Corpus(corpus_tokens)
    for text in Writer(CORPUS_SEED).take(corpus_tokens):
        corpus.append(text)
    corpus.refresh()
    while corpus.is_merging:
        corpus.refresh()
    corpus.maintain(DrafterConfig().refresh_interval_s)
    config = DrafterConfig(capacity=corpus_tokens)
    result: Results = {}
    with filled_sidecar(corpus_tokens) as address:
        for batch in (1, BATCH):
            client = client_of(address, deadline_s=LONG_DEADLINE_S)
            replica = ReplicaClient(address, config=config)
            while replica.copy.corpus is None or replica.copy.corpus.waiting:
                time.sleep(WAIT_S)
            engines = {
                "embedded": SimulatedEngine(ssd.SuffixDrafter(config, corpus=corpus), batch),
                "remote": SimulatedEngine(client, batch),
                "replica": SimulatedEngine(replica, batch),
            }
            cases = {
                name: lambda _, step=engine.step: [step() for _ in range(BLOCK_STEPS)]
                for name, engine in engines.items()
            }
            blocks = columns(alternated(cases, range(BLOCKS)))
            added = [
                statistics.median(remote) - statistics.median(embedded)
                for remote, embedded in zip(blocks["remote"], blocks["embedded"], strict=True)
            ]
            remote, embedded = ([*chain(*blocks[name])] for name in ("remote", "embedded"))
            result |= {
                f"rtt_us_p50_batch{batch}": microseconds(remote, 50),
                f"rtt_us_p99_batch{batch}": microseconds(remote, 99),
                f"embedded_us_p50_batch{batch}": microseconds(embedded, 50),
                f"replica_us_p50_batch{batch}": microseconds([*chain(*blocks["replica"])], 50),
                f"over_embedded_us_batch{batch}": round(statistics.median(added) * 1e6, 1),
                f"drafted_per_sequence_batch{batch}": round(engines["remote"].drafted / engines["remote"].steps, 2),
            }
            for engine in engines.values():
                engine.stop()
            client.close()
            replica.close()
    corpus.close()
    return result


def microseconds(seconds: list[float], percentile: float) -> float:
    """Return a percentile in microseconds, rounded."""
    return round(float(np.percentile(np.array(seconds) * 1e6, percentile)), 1)


def measure_engines(corpus_tokens: int) -> Results:
    """Return the drafts per second of several engines together, and their ratio to those of one engine."""
    with filled_sidecar(corpus_tokens) as address:
        cases = {count: partial(run_engines, address, count) for count in ENGINE_COUNTS}
        rounds = columns(alternated(cases, range(ENGINE_ROUNDS)))
    costs = [each["cpu_us_per_step"] for own in rounds.values() for engines in own for each in engines]
    result: Results = {"engine_cpu_us_per_step": round(statistics.median(costs))}
    for count, own in rounds.items():
        result[f"drafts_per_s_engines{count}"] = round(median_of(own, drafts_per_s))
        result[f"ratio_engines{count}"] = round(median_ratio(own, rounds[ENGINE_COUNTS[0]], drafts_per_s), 2)
    return result


def drafts_per_s(engines: list[Results]) -> float:
    """Return the sum over the engines of a round."""
    return sum(each["drafts_per_s"] for each in engines)


def run_engines(address: str, count: int, _number: int) -> list[Results]:
    """Run engines in separate processes, and return what each measured."""
    spawning = multiprocessing.get_context("spawn")
    with spawning.Pool(count, initializer=share, initargs=(spawning.Barrier(count),)) as pool:
        return pool.starmap(run_engine, [(address, ENGINE_SEED + 10 + number) for number in range(count)], chunksize=1)


_start: Any
"""Barrier that all engines of a round pass together."""


def share(start: Any) -> None:
    """Give this process the barrier."""
    global _start
    _start = start


def run_engine(address: str, seed: int) -> Results:
    """Run the steps of one engine with `BATCH` sequences, and return its measurements."""
    client = client_of(address, deadline_s=LONG_DEADLINE_S)
    engine = SimulatedEngine(client, BATCH, seed)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    drafts = engine.steps
    _start.wait()
    began, used_s = time.monotonic(), time.process_time()
    for _ in range(ENGINE_STEPS):
        engine.step()
    result = {
        "drafts_per_s": (engine.steps - drafts) / (time.monotonic() - began),
        "cpu_us_per_step": (time.process_time() - used_s) / ENGINE_STEPS * 1e6,
    }
    client.close()
    return result


def measure_log(corpus_tokens: int) -> Results:
    """Return what a shared log costs per token that one of two sidecars learns, and how soon the other one drafts it.

    Every sidecar reads the whole log, including what it has written itself.
    """
    with running_redis() as (port, redis_pid):
        options = ("--capacity", str(corpus_tokens), "--log", f"redis://127.0.0.1:{port}")
        with running_sidecar(*options) as first, running_sidecar(*options) as second:
            for sidecar in (first, second):
                fill(sidecar.address, [np.arange(PROBE_TOKENS, dtype=np.uint32)])
            processes = {"first_sidecar": first.pid, "redis": redis_pid, "second_sidecar": second.pid}
            cost = log_cost(first.address, port, processes)
            delays_ms = np.array(log_delays(first.address, second.address)) * 1e3
    p50, p99 = np.percentile(delays_ms, (50, 99)).round(1).tolist()
    return {**cost, "log_delay_ms_p50": p50, "log_delay_ms_p99": p99}


def log_cost(address: str, port: int, processes: dict[str, int]) -> Results:
    """Return processor time and network traffic per token of a `Feed`. processes: ids by name; port: that of Redis."""
    from redis import Redis

    redis = Redis("127.0.0.1", port)

    def used() -> np.ndarray:
        network = redis.info("stats")
        seconds = [1e6 * cpu_seconds(pid) for pid in processes.values()]
        return np.array([*seconds, network["total_net_input_bytes"], network["total_net_output_bytes"]])

    before = used()
    with Feed(address, FEED_TOKENS_PER_S) as feed:
        time.sleep(FEED_S)
    time.sleep(CATCH_UP_S)
    names = [*(f"log_cpu_us_{name}" for name in processes), "log_bytes_to_redis", "log_bytes_from_redis"]
    return dict(zip(names, ((used() - before) / feed.tokens).round(2).tolist(), strict=True))


def log_delays(first: str, second: str) -> list[float]:
    """Return the seconds from the end of each request at the first sidecar until the second one drafts its text."""
    delays = []
    with client_of(first) as writer, client_of(second, deadline_s=LONG_DEADLINE_S) as reader:
        for number in range(1, PROBES + 1):
            text = np.arange(number * PROBE_TOKENS, (number + 1) * PROBE_TOKENS, dtype=np.uint32)
            writer.start(number, text[:1])
            writer.finish(number, text[1:])
            began = time.monotonic()
            while reader.propose(text[:-1], 1).tokens.tolist() != [text[-1]]:
                if time.monotonic() - began > LONG_DEADLINE_S:
                    raise SystemExit(f"the second sidecar did not draft a text of the first in {LONG_DEADLINE_S:g} s")
                time.sleep(0.001)
            delays.append(time.monotonic() - began)
            time.sleep(PROBE_INTERVAL_S)
    return delays


@contextmanager
def running_redis() -> Iterator[tuple[int, int]]:
    """Run a redis-server that keeps its data as docs/operations.md advises; yield its port and its process id."""
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not installed; run: apt-get install redis-server, or choose other --parts")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", folder, "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "everysec"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            if not any("Ready to accept connections" in line for line in process.stdout):
                raise SystemExit("redis-server did not start")
            yield port, process.pid
        finally:
            process.kill()
            process.communicate()


PARTS: dict[str, Callable[[int], Results]] = {"steps": measure_steps, "engines": measure_engines, "log": measure_log}


def main() -> None:
    """Run the chosen measurements and print their results."""
    parser = new_parser("sidecar", __doc__)
    parser.add_argument("--corpus", type=positive, default=1_000_000, help="tokens in the corpus (1,000,000)")
    parser.add_argument("--parts", type=list_of(str), default=[*PARTS], help=f"parts to measure ({','.join(PARTS)})")
    options = parser.parse_args()
    result: Results = {}
    for name in options.parts:
        say(f"measuring {name}...")
        result |= PARTS[name](options.corpus)
    report(result, options.out)


if __name__ == "__main__":
    main()
