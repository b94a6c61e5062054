"""Measure a sidecar: round trips, load, learning, shadow mode and restarts. `python -m benchmarks.sidecar`.

Each part starts the real service. Text is synthetic. Engines are simulated; if several of them load the service, each
is a separate process. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, cycle
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import ssd
from benchmarks.support.simulated import SimulatedEngine
from benchmarks.support.text import Writer
from drafter_service.client import DrafterClient
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import MESSAGE_SIZES, pack
from ssd.config import DrafterConfig
from ssd.types import offsets_of

CORPUS_SEED, ENGINE_SEED, FEED_SEED = 1, 2, 3
MAX_DRAFT, COST = 8, 0.02
"""64 sequences with 8 tokens each: an engine verifies about 512 tokens in a step without additional time."""
BATCH = 64
ENGINES, STEPS_PER_S, LEARNED_PER_S = 4, 100, 20_000
"""Engines under load, steps per second of each, and tokens learned per second by the service."""
ENGINE_COUNTS, ENGINE_ROUNDS = (1, 2, 4), 3
"""Numbers of engines that are compared, in alternation."""
BLOCKS, BLOCK_STEPS = 9, 200
"""Embedded and remote drafting alternate in blocks of steps."""
BUSY_LEARNED_PER_S, BUSY_ENGINES = 100_000, 2
FEED_TEXTS = 40
"""Texts in one Observe call: 10,000 tokens."""
SHADOW_PROMPT, SHADOW_TEXTS = 80, 1000
"""Tokens of the prompts in shadow mode, and number of different Observe calls."""
SHADOW_BLOCKS, SHADOW_BLOCK_S, SHADOW_WARM_UP_S = 100, 0.2, 3.0
"""Calls with and without scoring alternate in blocks of this duration, after the time that scoring may use at once."""
LONG_DEADLINE_S = 10.0
NAMESPACE = "default"


@contextmanager
def service(folder: Path, *arguments: str) -> Iterator[str]:
    """Start a service, and yield its address."""
    address = f"unix:{folder}/drafter.sock"
    command = [
        sys.executable,
        "-m",
        "drafter_service.commands.main",
        "serve",
        "--listen",
        address,
        "--log-level",
        "warning",
    ]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if "listening at" not in process.stdout.readline():
                raise SystemExit("the service did not start; see above")
            yield address
        finally:
            process.terminate()
            process.wait(60)


def texts_message(texts: list[np.ndarray]) -> pb.Texts:
    """Return texts without request names as a message."""
    offsets = offsets_of(np.array([len(text) for text in texts], np.uint32))
    return pb.Texts(tokens=pack(np.concatenate(texts), "u4"), offsets=pack(offsets, "u4"))


def fill(address: str, tokens: int) -> None:
    """Send `tokens` tokens of text to the service, and wait until all of them are draftable."""
    texts = Writer(CORPUS_SEED).take(tokens)

    def requests() -> Iterator[pb.WarmRequest]:
        for first in range(0, len(texts), 2000):
            yield pb.WarmRequest(namespace=NAMESPACE, texts=texts_message(texts[first : first + 2000]))
        # Empty requests until a response reports that no tokens are waiting.
        while not is_done.is_set():
            yield pb.WarmRequest()
            time.sleep(0.05)

    is_done = threading.Event()
    with grpc.insecure_channel(address, options=MESSAGE_SIZES) as channel:
        for response in DrafterServiceStub(channel).Warm(requests(), wait_for_ready=True):
            if response.texts + response.duplicates == len(texts) and response.waiting_tokens == 0:
                is_done.set()


def client_of(address: str, **options: Any) -> DrafterClient:
    """Return a client of the namespace that is measured."""
    return DrafterClient(address, namespace=NAMESPACE, **options)


def engine_on(drafter: Any, batch: int, seed: int = ENGINE_SEED, *, learn: bool = False) -> SimulatedEngine:
    """Return a simulated engine with the settings of all measurements."""
    return SimulatedEngine(drafter, seed, batch, max_draft=MAX_DRAFT, cost=COST, learn=learn)


def paced_steps(engine: SimulatedEngine, steps: int, began: float, per_s: float = STEPS_PER_S) -> Iterator[float]:
    """Run `per_s` steps per second from the time `began` on; yield the seconds that each waited for drafts."""
    for step in range(steps):
        time.sleep(max(0.0, began + step / per_s - time.monotonic()))
        yield engine.step()


def microseconds(seconds: list[float], percentile: float) -> float:
    """Return a percentile in microseconds, rounded."""
    return round(float(np.percentile(np.array(seconds) * 1e6, percentile)), 1)


def measure_round_trips(folder: Path, corpus_tokens: int) -> dict[str, Any]:
    """Compare steps over a Unix socket with the same steps of an embedded drafter, in alternating blocks."""
    corpus = ssd.Corpus(corpus_tokens)
    for text in Writer(CORPUS_SEED).take(corpus_tokens):
        corpus.append(text)
    corpus.refresh()
    while corpus.is_merging:
        corpus.refresh()
    corpus.maintain(DrafterConfig().refresh_interval_s)
    config = DrafterConfig(capacity=corpus_tokens)
    result: dict[str, Any] = {}
    with service(folder, "--capacity", str(corpus_tokens)) as address:
        fill(address, corpus_tokens)
        for batch in (1, BATCH):
            client = client_of(address, deadline_s=LONG_DEADLINE_S)
            engines = {
                "embedded": engine_on(ssd.SuffixDrafter(config, corpus=corpus), batch),
                "remote": engine_on(client, batch),
            }
            times: dict[str, list[list[float]]] = {name: [] for name in engines}
            for _ in range(BLOCKS):
                for name, engine in engines.items():
                    times[name].append([engine.step() for _ in range(BLOCK_STEPS)])
            differences = [
                statistics.median(remote) - statistics.median(embedded)
                for remote, embedded in zip(times["remote"], times["embedded"], strict=True)
            ]
            remote, embedded = ([*chain(*times[name])] for name in ("remote", "embedded"))
            result |= {
                f"rtt_us_p50_batch{batch}": microseconds(remote, 50),
                f"rtt_us_p99_batch{batch}": microseconds(remote, 99),
                f"embedded_us_p50_batch{batch}": microseconds(embedded, 50),
                f"over_embedded_us_batch{batch}": round(statistics.median(differences) * 1e6, 1),
                f"drafted_per_sequence_batch{batch}": round(engines["remote"].drafted / engines["remote"].steps, 2),
            }
            for engine in engines.values():
                engine.stop()
            client.close()
    corpus.close()
    return result


class Feed:
    """A thread that sends text to the service at a constant rate."""

    def __init__(self, address: str, tokens_per_s: float, seed: int = FEED_SEED) -> None:
        self._channel = grpc.insecure_channel(address, options=MESSAGE_SIZES)
        self._stub = DrafterServiceStub(self._channel)
        self._texts = Writer(seed).requests()
        self._tokens_per_s = tokens_per_s
        self._stopping = threading.Event()
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._channel.close()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stopping.is_set():
            texts = [next(self._texts) for _ in range(FEED_TEXTS)]
            self._stub.Observe(pb.ObserveRequest(namespace=NAMESPACE, texts=texts_message(texts)))
            self.tokens += sum(map(len, texts))
            self._stopping.wait(max(0.0, began + self.tokens / self._tokens_per_s - time.monotonic()))


def run_engine(
    address: str, seed: int, steps: int, per_s: float, deadline_s: float, ready: Any, go: Event, results: Any
) -> None:
    """Run `steps` steps of one engine with `BATCH` sequences, `per_s` per second. Puts measurements in `results`."""
    client = client_of(address, deadline_s=deadline_s)
    engine = engine_on(client, BATCH, seed)
    for _ in range(STEPS_PER_S // 2):
        engine.step()
    misses, calls, drafts, tokens = client.counters.timeouts, engine.calls, engine.steps, engine.tokens
    phase = float(np.random.default_rng(seed).random()) / per_s
    ready.release()
    go.wait()
    began, used_s = time.monotonic(), time.process_time()
    waits = list(paced_steps(engine, steps, began + phase, per_s))
    drafts = engine.steps - drafts
    results.put(
        {
            "missed": client.counters.timeouts - misses,
            "calls": engine.calls - calls,
            "waits": waits,
            "tokens_per_step": (engine.tokens - tokens) / drafts,
            "drafts_per_s": drafts / (time.monotonic() - began),
            "cpu_us_per_step": (time.process_time() - used_s) / steps * 1e6,
        }
    )
    client.close()


def run_engines(
    address: str, engines: int, steps: int, *, per_s: float = STEPS_PER_S, deadline_s: float, feed: float = 0.0
) -> list[dict[str, Any]]:
    """Run engines in separate processes while the service learns `feed` tokens/s; return their measurements."""
    spawning = multiprocessing.get_context("spawn")
    ready, go, results = spawning.Semaphore(0), spawning.Event(), spawning.Queue()
    processes = [
        spawning.Process(
            target=run_engine, args=(address, ENGINE_SEED + 10 + number, steps, per_s, deadline_s, ready, go, results)
        )
        for number in range(engines)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    if feed:
        with Feed(address, feed):
            go.set()
            measured = [results.get() for _ in processes]
    else:
        go.set()
        measured = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return measured


def measure_load(folder: Path, corpus_tokens: int, seconds: float) -> dict[str, Any]:
    """Run four engines with the default deadline while the service learns."""
    with service(folder, "--capacity", str(corpus_tokens)) as address:
        fill(address, corpus_tokens)
        steps = round(seconds * STEPS_PER_S)
        measured = run_engines(address, ENGINES, steps, deadline_s=0.002, feed=LEARNED_PER_S)
    waits = [*chain(*(each["waits"] for each in measured))]
    return {
        "missed_deadline_share": sum(each["missed"] for each in measured) / sum(each["calls"] for each in measured),
        "load_step_us_p50": microseconds(waits, 50),
        "load_step_us_p99": microseconds(waits, 99),
    }


def measure_engines(folder: Path, corpus_tokens: int, seconds: float) -> dict[str, Any]:
    """Compare the drafts per second of several engines with those of one; each asks again as soon as it has drafts."""
    steps = round(seconds * STEPS_PER_S)
    rates: dict[int, list[float]] = {count: [] for count in ENGINE_COUNTS}
    client_us = []
    with service(folder, "--capacity", str(corpus_tokens)) as address:
        fill(address, corpus_tokens)
        for _ in range(ENGINE_ROUNDS):
            for count in ENGINE_COUNTS:
                measured = run_engines(address, count, steps, per_s=float("inf"), deadline_s=LONG_DEADLINE_S)
                rates[count].append(sum(each["drafts_per_s"] for each in measured))
                client_us += [each["cpu_us_per_step"] for each in measured]
    result: dict[str, Any] = {"engine_cpu_us_per_step": round(statistics.median(client_us))}
    for count, rate in rates.items():
        ratios = [one / first for one, first in zip(rate, rates[ENGINE_COUNTS[0]], strict=True)]
        result[f"drafts_per_s_engines{count}"] = round(statistics.median(rate))
        result[f"ratio_engines{count}"] = round(statistics.median(ratios), 2)
    return result


def measure_learning(folder: Path, capacity: int, seconds: float) -> dict[str, Any]:
    """Measure how fast a full ring buffer learns, and step times and acceptance with and without learning."""
    result: dict[str, Any] = {}
    with service(folder, "--capacity", str(capacity)) as address:
        fill(address, capacity)
        with Feed(address, float("inf")) as feed:
            time.sleep(seconds)
        result["learn_tokens_per_s"] = round(feed.tokens / seconds)
        for name, tokens_per_s in (("idle", 0.0), ("learning", float(BUSY_LEARNED_PER_S))):
            steps = round(seconds / 3 * STEPS_PER_S)
            measured = run_engines(address, BUSY_ENGINES, steps, deadline_s=LONG_DEADLINE_S, feed=tokens_per_s)
            result[f"step_us_p99_{name}"] = microseconds([*chain(*(each["waits"] for each in measured))], 99)
            result[f"tokens_per_step_{name}"] = round(statistics.mean(each["tokens_per_step"] for each in measured), 3)
        with Feed(address, float(BUSY_LEARNED_PER_S)):
            result["freshness_ms_p99"] = measure_freshness(address, seconds / 3)
    return result


def measure_freshness(address: str, seconds: float) -> float:
    """Return the time from the acknowledgement of a text until its end is drafted, 99th percentile in ms."""
    rng, taken, until = np.random.default_rng(0), [], time.monotonic() + seconds
    client = client_of(address, deadline_s=LONG_DEADLINE_S)
    with grpc.insecure_channel(address) as channel:
        stub, sequence = DrafterServiceStub(channel), 0
        while time.monotonic() < until:
            text = rng.integers(0, 1 << 20, 24, np.uint32) + np.uint32(1 << 21)
            stub.Observe(pb.ObserveRequest(namespace=NAMESPACE, texts=texts_message([text])))
            began, drafted = time.monotonic(), False
            while not drafted:
                client.start(sequence, text[:16])
                drafts = client.draft(_progress_of(sequence))
                client.finish(sequence, np.empty(0, np.uint32), learn=False)
                sequence, drafted = sequence + 1, drafts.tokens[:1].tolist() == [int(text[16])]
            taken.append(time.monotonic() - began)
    client.close()
    return round(float(np.percentile(taken, 99)) * 1e3, 2)


def _progress_of(sequence: int) -> Any:
    from ssd.types import Progress

    none = np.zeros(1, np.uint32)
    return Progress(np.array([sequence], np.uint64), none[:0], np.zeros(2, np.uint32), none, none + MAX_DRAFT, COST)


def measure_shadow(folder: Path, corpus_tokens: int) -> dict[str, Any]:
    """Compare the rates of Observe with and without scoring of the same requests, in alternating blocks."""
    requests = Writer(FEED_SEED).requests()
    plain, scored = list[pb.Texts](), list[pb.Texts]()
    for _ in range(SHADOW_TEXTS):
        texts = [next(requests) for _ in range(FEED_TEXTS)]
        # Without prompt lengths, a log shipper sends what is learned: the ends of prompts, and outputs.
        plain.append(texts_message([text[SHADOW_PROMPT - DrafterConfig.learned_prompt_tokens :] for text in texts]))
        scored.append(texts_message(texts))
        scored[-1].prompt_lengths = pack(np.full(FEED_TEXTS, SHADOW_PROMPT, np.uint32), "u4")
    streams = {"plain": cycle(plain), "scored": cycle(scored)}
    calls = dict.fromkeys(streams, 0)
    seconds = dict.fromkeys(streams, 0.0)
    with service(folder, "--capacity", str(corpus_tokens)) as address, grpc.insecure_channel(address) as channel:
        fill(address, corpus_tokens)
        stub = DrafterServiceStub(channel)

        def send(name: str, duration: float) -> None:
            began = time.monotonic()
            while time.monotonic() < began + duration:
                stub.Observe(pb.ObserveRequest(namespace=NAMESPACE, texts=next(streams[name])))
                calls[name] += 1
            seconds[name] += time.monotonic() - began

        send("scored", SHADOW_WARM_UP_S)
        calls["scored"], seconds["scored"] = 0, 0.0
        for _ in range(SHADOW_BLOCKS):
            send("plain", SHADOW_BLOCK_S)
            send("scored", SHADOW_BLOCK_S)
        (report,) = json.loads(stub.Report(pb.ReportRequest()).json)["namespaces"]
    # Means, because merges into the base tier fall into few of the blocks.
    plain_rate, scored_rate = (FEED_TEXTS * calls[name] / seconds[name] for name in ("plain", "scored"))
    return {
        "observe_requests_per_s": round(plain_rate),
        "observe_requests_per_s_shadow": round(scored_rate),
        "shadow_overhead": round(1 - scored_rate / plain_rate, 3),
        "shadow_scored_share": round(report["shadow"]["scored_requests"] / report["shadow"]["observed_requests"], 3),
        "shadow_scored_tokens": report["shadow"]["drafting"]["committed"],
    }


def measure_restart(folder: Path, capacity: int) -> dict[str, Any]:
    """Measure the time from the start of the process, with a full snapshot, until the first draft."""
    arguments = ("--capacity", str(capacity), "--snapshot-folder", str(folder / "snapshots"))
    with service(folder, *arguments) as address:
        fill(address, capacity)
        with grpc.insecure_channel(address) as channel:
            DrafterServiceStub(channel).Snapshot(pb.SnapshotRequest())
    text = Writer(CORPUS_SEED).take(1000)[0]
    times = []
    for _ in range(5):
        began = time.monotonic()
        with service(folder, *arguments) as address:
            client = client_of(address, deadline_s=LONG_DEADLINE_S)
            client.start(1, text[:100])
            while len(client.draft(_progress_of(1)).tokens) == 0:
                client.finish(1, np.empty(0, np.uint32), learn=False)
                client.start(1, text[:100])
            times.append(time.monotonic() - began)
            client.close()
    return {"restart_s_16m": round(statistics.median(times), 2), "restart_tokens": capacity}


def main() -> None:
    """Run the chosen measurements and print their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=int, default=1_000_000, help="tokens in the corpus for round trips and load")
    parser.add_argument(
        "--capacity", type=int, default=16_000_000, help="tokens in the corpus for learning and restarts"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each measurement under load")
    parser.add_argument("--parts", default="rtt,load,engines,learn,shadow,restart", help="parts to measure")
    options = parser.parse_args()

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "rtt": lambda folder: measure_round_trips(folder, options.corpus),
        "load": lambda folder: measure_load(folder, options.corpus, options.seconds),
        "engines": lambda folder: measure_engines(folder, options.corpus, options.seconds),
        "learn": lambda folder: measure_learning(folder, options.capacity, options.seconds),
        "shadow": lambda folder: measure_shadow(folder, options.corpus),
        "restart": lambda folder: measure_restart(folder, options.capacity),
    }
    result: dict[str, Any] = {}
    for name in options.parts.split(","):
        log(f"measuring {name}...")
        with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
            measured = parts[name](Path(folder))
        log("  " + ", ".join(f"{key} {value}" for key, value in measured.items()))
        result |= measured
    print(json.dumps(result))


if __name__ == "__main__":
    main()
