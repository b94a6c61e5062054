"""Measure a sidecar: what it adds to a step, and how many drafts several engines get from it.

    python -m benchmarks.sidecar [--parts steps,engines] [--corpus 1000000] [--out FILE]

`steps` compares steps over a Unix socket with the same steps of an embedded drafter, and of a replica of the sidecar's
corpus in this process, in alternated blocks. `engines`
compares the drafts per second of several engines, each in a process of its own, with those of one; each asks again as
soon as it has drafts. Engines are simulated and text is synthetic; the service is the real one. The last line of the
output is one JSON document.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

import ssd
from benchmarks.support import list_of, new_parser, positive, report, say
from benchmarks.support.load import (
    CORPUS_SEED,
    ENGINE_SEED,
    LONG_DEADLINE_S,
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

Results = dict[str, float]


def measure_steps(address: str, corpus_tokens: int) -> Results:
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
        blocks = columns(alternated({name: partial(block, engine) for name, engine in engines.items()}, range(BLOCKS)))
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


def block(engine: SimulatedEngine, _number: int) -> list[float]:
    """Return the seconds of each step of a block."""
    return [engine.step() for _ in range(BLOCK_STEPS)]


def microseconds(seconds: list[float], percentile: float) -> float:
    """Return a percentile in microseconds, rounded."""
    return round(float(np.percentile(np.array(seconds) * 1e6, percentile)), 1)


def measure_engines(address: str, _corpus_tokens: int) -> Results:
    """Return the drafts per second of several engines together, and their ratio to those of one engine."""
    rounds = columns(
        alternated({count: partial(run_engines, address, count) for count in ENGINE_COUNTS}, range(ENGINE_ROUNDS))
    )
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


PARTS: dict[str, Callable[[str, int], Results]] = {"steps": measure_steps, "engines": measure_engines}


def main() -> None:
    """Run the chosen measurements and print their results."""
    parser = new_parser("sidecar", __doc__)
    parser.add_argument("--corpus", type=positive, default=1_000_000, help="tokens in the corpus (1,000,000)")
    parser.add_argument("--parts", type=list_of(str), default=[*PARTS], help=f"parts to measure ({','.join(PARTS)})")
    options = parser.parse_args()
    result: Results = {}
    for name in options.parts:
        say(f"measuring {name}...")
        with running_sidecar("--capacity", str(options.corpus)) as sidecar:
            fill(sidecar.address, Writer(CORPUS_SEED).take(options.corpus))
            result |= PARTS[name](sidecar.address, options.corpus)
    report(result, options.out)


if __name__ == "__main__":
    main()
