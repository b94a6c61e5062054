"""Measure the index: memory, search, draft and snapshot times, and the delay until new text can be drafted.

    python -m benchmarks.index [--tokens 16M] [--contexts 3000] [--out FILE]

The last line is one JSON document. Contexts are the ends of requests that are not in the corpus, each used once. The
time of a draft is the duration of the call, which also commits the tokens since the last draft. Times depend on the
machine: compare them only within one run.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path

import numpy as np

import ssd
from benchmarks.support import forget_peak, new_parser, peak_bytes, positive, report
from benchmarks.support.load import REQUEST_TOKENS, Writer
from drafter_service.observability.measuring.rounds import Timer
from drafter_service.observability.process import resident_bytes
from drafter_service.settings.flags import Quantity
from ssd.config import DrafterConfig
from ssd.corpus.memory import trim_heap
from ssd.replay import RecordedRequest, Recording
from ssd.types import DraftBatch, Progress

PROMPT = 48
"""Number of prompt tokens of a request; the other tokens are its output."""
FEED_TOKENS_PER_S = 50_000
FEED_S = 10.0
BATCH, BATCH_NODES = 64, 8

PATH = DrafterConfig(draft_shape="path")
TREE = DrafterConfig(draft_shape="tree", max_draft=16, cost=0.005)


def settle(corpus: ssd.Corpus) -> None:
    """Finish all index updates, so that they do not affect the next measurement."""
    while corpus.is_merging:
        corpus.refresh()


def percentiles(seconds: list[float], name: str) -> dict[str, float]:
    """Return median and 99th percentile in microseconds."""
    p50, p99 = np.percentile(np.array(seconds) * 1e6, [50, 99])
    return {f"{name}_us_p50": round(float(p50), 2), f"{name}_us_p99": round(float(p99), 2)}


def timed(name: str, call: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of a call, and its processor time."""
    with Timer() as timer:
        call()
    return {f"{name}_s": round(timer.wall_s, 3), f"{name}_cpu_s": round(timer.cpu_s, 3)}


class Unlearned:
    """A drafter whose corpus a replay leaves as it is: text of the replay is neither remembered nor indexed."""

    def __init__(self, corpus: ssd.Corpus, config: DrafterConfig) -> None:
        self._drafter = ssd.SuffixDrafter(replace(config, capacity=corpus.capacity), corpus=corpus)
        self.start, self.close = self._drafter.start, self._drafter.close
        self.commit_s = 0.0
        """Seconds of the calls that commit the tokens of a step, if `apart`."""
        self.apart = False
        """Whether tokens are committed in a call of their own."""

    def draft(self, progress: Progress) -> DraftBatch:
        """Commit the tokens of a step, and draft."""
        if not self.apart:
            return self._drafter.draft(progress)
        none = np.zeros_like(progress.verified)
        began = time.perf_counter()
        self._drafter.draft(replace(progress, max_draft=none))
        self.commit_s += time.perf_counter() - began
        return self._drafter.draft(
            replace(progress, tokens=progress.tokens[:0], offsets=np.zeros_like(progress.offsets), verified=none)
        )

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = False) -> None:
        """End a sequence."""
        self._drafter.finish(sequence_id, tokens, verified=verified, learn=learn)


def recorded(requests: Sequence[np.ndarray]) -> Recording:
    """Return requests whose first `PROMPT` tokens are their prompts."""
    return Recording.of([RecordedRequest(request[:PROMPT], request[PROMPT:]) for request in requests])


def time_drafts(corpus: ssd.Corpus, config: DrafterConfig, requests: list[np.ndarray], contexts: int) -> list[float]:
    """Return the seconds of each draft for one sequence."""
    seconds: list[float] = []
    drafter = Unlearned(corpus, config)
    for request in requests:
        ssd.replay.replay(
            recorded([request]),
            drafter,
            max_draft=config.max_draft,
            observe=lambda step: seconds.append(step.draft_s),
        )
        if len(seconds) >= contexts:
            break
    return seconds


def time_batches(corpus: ssd.Corpus, requests: list[np.ndarray], rounds: int) -> list[float]:
    """Return the seconds of each draft for BATCH sequences of BATCH_NODES nodes each."""
    drafter = Unlearned(corpus, DrafterConfig(draft_shape="tree", max_draft=BATCH_NODES, cost=0.005))
    seconds: list[float] = []

    def observe(step: ssd.replay.Step) -> None:
        if len(step) == BATCH:
            seconds.append(step.draft_s)

    for first in range(0, len(requests) - BATCH, BATCH):
        batch = recorded(requests[first : first + BATCH])
        ssd.replay.replay(batch, drafter, concurrency=BATCH, max_draft=BATCH_NODES, observe=observe)
        if len(seconds) >= rounds:
            break
    return seconds


def time_searches(corpus: ssd.Corpus, requests: list[np.ndarray]) -> list[float]:
    """Return the seconds of each longest-match search, with a context of each request."""
    rng = np.random.default_rng(3)
    from ssd.corpus.search import longest_match

    seconds, depth = [], DrafterConfig.match_depth
    for request, end in zip(requests, rng.integers(32, REQUEST_TOKENS, len(requests)).tolist(), strict=True):
        context = request[:end]
        began = time.perf_counter()
        longest_match(corpus.view, context, depth)
        seconds.append(time.perf_counter() - began)
    return seconds


def time_feedback(corpus: ssd.Corpus, requests: list[np.ndarray]) -> float:
    """Return the microseconds per output token for committing, learning and counting."""
    drafter = Unlearned(corpus, TREE)
    drafter.apart = True
    counts = ssd.replay.replay(recorded(requests), drafter, max_draft=TREE.max_draft)
    return drafter.commit_s / int(counts.tokens.sum()) * 1e6


def write_additions(writer: Writer, tokens: int) -> dict[str, list[list[np.ndarray]]]:
    """Return the requests of each merge of `time_merges`, together enough for a merge of the base tier."""
    sizes = {"1k": (1_000, 9), "4k": (4_096, 9), "64k": (65_536, 3), "1M": (1 << 20, 3 + (tokens >> 26))}
    return {name: [writer.take(size) for _ in range(rounds)] for name, (size, rounds) in sizes.items()}


def time_merges(corpus: ssd.Corpus, additions: dict[str, list[list[np.ndarray]]]) -> dict[str, float]:
    """Return the milliseconds until new tokens can be drafted."""
    merge_ms = {}
    for name, rounds in additions.items():
        times = []
        for requests in rounds:
            for request in requests:
                corpus.append(request)
            began = time.perf_counter()
            corpus.refresh()
            times.append((time.perf_counter() - began) * 1e3)
            settle(corpus)
        merge_ms[name] = round(float(np.median(times)), 2)
    return merge_ms


def time_saving(corpus: ssd.Corpus, path: Path) -> dict[str, float]:
    """Return the size of a snapshot, the time of saving it, and that of copying the file until it is safe on disk."""
    from ssd.corpus.snapshot import save

    def copy_safely() -> None:
        with Path(shutil.copyfile(path, copy)).open("rb") as file:
            os.fsync(file)

    copy = path.with_suffix(".copy")
    result = timed("snapshot", lambda: save(corpus, path)) | timed("copy", copy_safely)
    copy.unlink()
    return {"snapshot_bytes": path.stat().st_size, **result}


def time_restoring(path: Path) -> dict[str, float]:
    """Return the times of reading a snapshot into memory and of restoring it; the file is cached."""
    from ssd.corpus.snapshot import load

    # A virtual machine takes longer for memory that it has not used before.
    np.ones(path.stat().st_size, np.uint8)
    result = timed("read", lambda: np.fromfile(path, np.uint8))
    return result | timed("restore", lambda: load(path).corpus.refresh())


class Feed(threading.Thread):
    """Appends requests at a constant rate, and records the delay until each is in a view.

    It does not poll for new views: each poll would take the GIL from the thread that drafts.
    """

    def __init__(self, corpus: ssd.Corpus, requests: list[np.ndarray]) -> None:
        super().__init__(daemon=True)
        self._corpus, self._requests = corpus, requests
        self._appended = corpus.indexed
        self._waiting: deque[tuple[int, float]] = deque()
        self.waited_s: list[float] = []
        corpus.times.on_refresh = self._record_indexed

    def run(self) -> None:
        """Append all requests."""
        interval, begin = REQUEST_TOKENS / FEED_TOKENS_PER_S, time.perf_counter()
        for index, request in enumerate(self._requests):
            self._appended += len(request) + 1
            self._waiting.append((self._appended, time.perf_counter()))
            self._corpus.append(request)
            time.sleep(max(0.0, begin + (index + 1) * interval - time.perf_counter()))

    def _record_indexed(self, _: float) -> None:
        """Record the delays of requests that are in the newest view."""
        indexed, now = self._corpus.indexed, time.perf_counter()
        while self._waiting and self._waiting[0][0] <= indexed:
            self.waited_s.append(now - self._waiting.popleft()[1])


def time_feed(corpus: ssd.Corpus, writer: Writer, contexts: list[np.ndarray]) -> dict[str, float]:
    """Measure the delay of new text under continuous appending, and draft times during it."""
    corpus.maintain(DrafterConfig.refresh_interval_s)
    feed = Feed(corpus, writer.take(int(FEED_TOKENS_PER_S * FEED_S)))
    feed.start()
    seconds: list[float] = []
    for first in range(0, len(contexts), 8):
        seconds += time_drafts(corpus, PATH, contexts[first : first + 8], 1_000_000)
        if not feed.is_alive():
            break
    feed.join()
    corpus.close()
    corpus.refresh()
    return {
        "freshness_ms_p99": round(float(np.percentile(feed.waited_s, 99)) * 1e3, 2),
        "path_us_p99_while_merging": percentiles(seconds, "path")["path_us_p99"],
    }


def measure(tokens: int, contexts: int, say: Callable[[str], None]) -> dict[str, object]:
    """Measure all figures for a corpus of `tokens` tokens."""
    # Kernels are loaded first, so that their memory is not counted as the corpus's.
    for module in ("ssd.drafter", "ssd.corpus.search"):
        import_module(module)
    writer = Writer(seed=1)
    additions = write_additions(writer, tokens)
    gc.collect()
    trim_heap()
    before = resident_bytes()
    corpus = ssd.Corpus.from_config(DrafterConfig(capacity=tokens))
    say(f"writing {tokens:,} tokens")
    # No text is held in this function: it would be counted as the corpus's memory.
    deque(map(corpus.append, islice(writer.requests(), tokens // (REQUEST_TOKENS + 1))), maxlen=0)
    say("building the index")
    result: dict[str, object] = {**timed("build", corpus.refresh), "tokens": corpus.tokens}
    settle(corpus)
    gc.collect()
    trim_heap()
    at_rest = resident_bytes() - before
    result["bytes_per_token"] = round(at_rest / corpus.tokens, 2)
    fresh = Writer(seed=2).take((contexts // 20 + 400) * REQUEST_TOKENS)
    for name, config in (("path", PATH), ("tree16", TREE)):
        say(f"drafting: {name}")
        time_drafts(corpus, config, fresh[:50], 500)
        result |= percentiles(time_drafts(corpus, config, fresh[50:], contexts), name)
    say("searching, batches, feedback")
    result |= percentiles(time_searches(corpus, Writer(seed=4).take(contexts * REQUEST_TOKENS)), "search")
    batches = time_batches(corpus, Writer(seed=5).take(BATCH * 40 * REQUEST_TOKENS), 200)
    result["batch64_us_p50"] = percentiles(batches, "batch")["batch_us_p50"]
    result["feedback_us_per_token"] = round(time_feedback(corpus, Writer(seed=6).take(100 * REQUEST_TOKENS)), 2)
    say("merging")
    gc.collect()
    trim_heap()
    # Memory of the measurements before is left out.
    held = resident_bytes() - at_rest
    forget_peak()
    result["merge_ms"] = time_merges(corpus, additions)
    result["peak_bytes_per_token_merging"] = round((peak_bytes() - held) / corpus.tokens, 2)
    say(f"feeding {FEED_TOKENS_PER_S:,} tokens a second for {FEED_S:.0f} s")
    result |= time_feed(corpus, writer, Writer(seed=7).take(4_000 * REQUEST_TOKENS))
    say("saving and restoring")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "corpus.ssd")
        result |= time_saving(corpus, path)
        # The largest corpus that fits into memory fits only once.
        del corpus
        return result | time_restoring(path)


def main() -> None:
    """Measure and print."""
    parser = new_parser("index", __doc__)
    parser.add_argument("--tokens", default="16M", help="size of the corpus, such as 1M or 16000000")
    parser.add_argument("--contexts", type=positive, default=3000, help="drafts and searches that are timed")
    options = parser.parse_args()
    tokens = Quantity().convert(options.tokens, None, None)
    report(measure(tokens, options.contexts, lambda text: print(f"{text} ...", flush=True)), options.out)


if __name__ == "__main__":
    main()
