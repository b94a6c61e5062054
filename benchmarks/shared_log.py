"""Measure how fast a replica reads what another one publishes, through a real Redis.

    python -m benchmarks.shared_log [--tokens 20000000] [--capacity 16000000]

The reader has one core; the publishing replica and Redis share the other. Two cases are measured: the reader only
counts tokens, and it learns them into a corpus that is refreshed in the background. The last line of the output is one
JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time

import numpy as np

import ssd
from benchmarks.text import REQUEST_TOKENS, Writer
from drafter_service.replication.events import Event, Finished
from drafter_service.replication.shared_log import SharedLog
from ssd.config import DrafterConfig
from ssd.hardware.processors import usable_processors
from tests.redis import running_redis

NAMESPACE = "benchmark"
PUBLISHED_AT_ONCE = 1 << 20
DIFFERENT_TOKENS = 4 << 20
WAITING_TOKENS = 1 << 20
"""The reader waits while more tokens than this are not draftable yet."""


def use_core(number: int) -> None:
    """Pin this process to one of the available cores."""
    cores = sorted(usable_processors())
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def publish(url: str, tokens: int, started: float) -> None:
    """Run the other replica: publish as fast as Redis accepts it. `started`: the time of the requests."""
    use_core(0)
    texts = Writer(1).take(DIFFERENT_TOKENS)

    async def run() -> None:
        shared = SharedLog(url)
        log = shared.open(NAMESPACE)
        for first in range(0, tokens // REQUEST_TOKENS, PUBLISHED_AT_ONCE // REQUEST_TOKENS):
            for number in range(first, min(first + PUBLISHED_AT_ONCE // REQUEST_TOKENS, tokens // REQUEST_TOKENS)):
                log.publish(Finished(f"request-{number}", texts[number % len(texts)], started))
            await log.flush()
        assert log.counters.dropped_tokens == 0
        await log.close()
        await shared.close()

    asyncio.run(run())


class Consumer:
    """Counts tokens of events, and learns them if there is a corpus."""

    def __init__(self, expected: int, corpus: ssd.Corpus | None) -> None:
        self._corpus, self._left, self._appended = corpus, expected, 0
        self.is_finished = asyncio.Event()
        self.began = 0.0

    async def take(self, events: list[Event]) -> None:
        """Process events; see `Reader.run`."""
        self.began = self.began or time.perf_counter()
        for event in events:
            assert isinstance(event, Finished)
            self._left -= len(event.tokens)
            if self._corpus is not None:
                self._corpus.append(event.tokens, event.request)
                self._appended += len(event.tokens) + 1
        await self.wait_until_draftable(WAITING_TOKENS if self._left else 0)
        if not self._left:
            self.is_finished.set()

    async def wait_until_draftable(self, all_but: int) -> None:
        """Wait until at most `all_but` tokens of the corpus are not draftable yet."""
        while self._corpus is not None and self._appended - self._corpus.indexed > all_but:
            await asyncio.sleep(0.002)


async def tokens_per_s(url: str, tokens: int, corpus: ssd.Corpus | None) -> float:
    """Return tokens per second, from the first entry until all are read and draftable."""
    shared = SharedLog(url)
    log = shared.open(NAMESPACE)
    expected = tokens // REQUEST_TOKENS * REQUEST_TOKENS
    consumer = Consumer(expected, corpus)
    reading = asyncio.create_task(log.reader().run(consumer.take))
    writer = multiprocessing.get_context("spawn").Process(target=publish, args=(url, tokens, time.time()))
    writer.start()
    await asyncio.to_thread(writer.join)
    if writer.exitcode:
        raise SystemExit("the publishing replica failed")
    await consumer.is_finished.wait()
    seconds = time.perf_counter() - consumer.began
    reading.cancel()
    await log.close()
    await shared.close()
    return expected / seconds


def measure(tokens: int, corpus: ssd.Corpus | None) -> float:
    """Return tokens per second with a new Redis."""
    with running_redis() as server:
        return asyncio.run(tokens_per_s(server.url, tokens, corpus))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--capacity", type=int, default=16_000_000)
    options = parser.parse_args()
    use_core(1)
    corpus = ssd.Corpus.from_config(DrafterConfig(capacity=options.capacity))
    # Compile before the measurements.
    corpus.append(np.arange(100, dtype=np.uint32))
    corpus.refresh()
    log_rate = measure(options.tokens, None)
    print(f"through the log: {log_rate:,.0f} tokens/s")
    corpus.maintain(DrafterConfig().refresh_interval_s)
    learned_rate = measure(options.tokens, corpus)
    corpus.close()
    print(f"through the log and learned: {learned_rate:,.0f} tokens/s")
    print(json.dumps({"log_tokens_per_s": round(log_rate), "log_learned_tokens_per_s": round(learned_rate)}))


if __name__ == "__main__":
    main()
