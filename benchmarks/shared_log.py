"""How fast a replica takes what another publishes, through a real Redis.

    python -m benchmarks.shared_log [--tokens 20000000] [--capacity 16000000]

The reader has a core for itself; the publishing replica and Redis share the other. Once it only counts, once it learns
into a corpus with its maintainer at work. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time

import numpy as np

from benchmarks.text import REQUEST_TOKENS, Writer
from drafter_service.replication.events import Event, Finished
from drafter_service.replication.shared_log import SharedLog
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from tests.redis import running_redis

NAMESPACE = "benchmark"
PUBLISHED_AT_ONCE = 1 << 20
DIFFERENT_TOKENS = 4 << 20
WAITING_TOKENS = 1 << 20
"""The reader waits with more than this not draftable yet."""


def use_core(number: int) -> None:
    """Stay on one core, of those that there are."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def publish(url: str, tokens: int, started: float) -> None:
    """The other replica: publishes as fast as Redis takes it. `started`: the time of the requests."""
    use_core(0)
    texts = Writer(1).take(DIFFERENT_TOKENS)

    async def run() -> None:
        shared = SharedLog(url)
        log = shared.open(NAMESPACE)
        for first in range(0, tokens // REQUEST_TOKENS, PUBLISHED_AT_ONCE // REQUEST_TOKENS):
            for number in range(first, min(first + PUBLISHED_AT_ONCE // REQUEST_TOKENS, tokens // REQUEST_TOKENS)):
                log.publish(Finished(f"request-{number}", texts[number % len(texts)], started))
            await log.flush()
        assert log.counters.dropped == 0
        await log.close()
        await shared.close()

    asyncio.run(run())


class Taken:
    """Counts what it takes, and learns it where there is a corpus."""

    def __init__(self, expected: int, corpus: Corpus | None) -> None:
        self._corpus, self._left, self._appended = corpus, expected, 0
        self.all = asyncio.Event()
        self.began = 0.0

    async def take(self, events: list[Event]) -> None:
        """As `Reader.run` wants it."""
        self.began = self.began or time.perf_counter()
        for event in events:
            assert isinstance(event, Finished)
            self._left -= len(event.tokens)
            if self._corpus is not None:
                self._corpus.append(event.tokens, event.request)
                self._appended += len(event.tokens) + 1
        await self.until_draftable(WAITING_TOKENS if self._left else 0)
        if not self._left:
            self.all.set()

    async def until_draftable(self, all_but: int) -> None:
        """Returns when no more than this number of tokens wait in the corpus."""
        while self._corpus is not None and self._appended - self._corpus.indexed > all_but:
            await asyncio.sleep(0.002)


async def tokens_per_s(url: str, tokens: int, corpus: Corpus | None) -> float:
    """From the first entry until all are taken, and draftable."""
    shared = SharedLog(url)
    log = shared.open(NAMESPACE)
    expected = tokens // REQUEST_TOKENS * REQUEST_TOKENS
    taken = Taken(expected, corpus)
    reading = asyncio.create_task(log.reader().run(taken.take))
    writer = multiprocessing.get_context("spawn").Process(target=publish, args=(url, tokens, time.time()))
    writer.start()
    await asyncio.to_thread(writer.join)
    if writer.exitcode:
        raise SystemExit("the publishing replica failed")
    await taken.all.wait()
    seconds = time.perf_counter() - taken.began
    reading.cancel()
    await log.close()
    await shared.close()
    return expected / seconds


def measure(tokens: int, corpus: Corpus | None) -> float:
    """With a Redis of its own."""
    with running_redis() as server:
        return asyncio.run(tokens_per_s(server.url, tokens, corpus))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--capacity", type=int, default=16_000_000)
    options = parser.parse_args()
    use_core(1)
    corpus = Corpus.from_config(DrafterConfig(capacity=options.capacity))
    # Compiles before anything is timed.
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
