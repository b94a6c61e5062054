"""A load: one thread reads and parses, the tokenizer's threads tokenize, and the caller's thread learns."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from queue import Empty, Queue
from typing import NamedTuple, TypeVar

from drafter_service.ingest.containers import Batch, read_batches
from drafter_service.ingest.documents import NO_TOKENIZER, Faults, Item, Sink, Totals
from drafter_service.ingest.files import File
from drafter_service.ingest.reading import Reading, encode
from ssd.errors import UserError

A = TypeVar("A")
B = TypeVar("B")

PAUSE_S = 0.05
"""Interval at which a waiting thread checks whether to stop."""

BATCHES_READ = 2
"""Batches that wait to be tokenized."""
TOKENIZERS = 2
"""Batches that are tokenized at the same time: while the ids of one are copied, the library tokenizes the other."""
BATCHES_ENCODED = 16
"""Batches that wait for the sink. They are small, and the sink takes seconds when it sorts or saves."""
MAX_UNREADABLE = 1000
"""Number of texts after which a load without a tokenizer fails if it has no document."""


class LoadProgress(NamedTuple):
    """Progress of a load."""

    bytes_read: int
    documents: int
    tokens: int


class Summary(NamedTuple):
    """Result of a load."""

    learned: Totals
    kinds: Counter[str]
    """Number of files by format."""
    faults: Faults
    seconds: float


def load(files: Sequence[File], reading: Reading, sink: Sink, watch: Callable[[LoadProgress], None]) -> Summary:
    """Learn all files. `watch` is called after each batch.

    Raises UserError, also if the files contain no documents.
    """
    began = time.perf_counter()
    kinds: Counter[str] = Counter()
    documents = tokens = 0
    with closing(read_all(files, reading, kinds, encode)) as encoded:
        for bytes_read, batch in encoded:
            if len(batch):
                sink.accept(batch)
            documents += len(batch)
            tokens += len(batch.tokens)
            if documents == 0:
                check_readable(reading, MAX_UNREADABLE)
            watch(LoadProgress(bytes_read, documents, tokens))
    if documents == 0:
        check_readable(reading, 1)
        reasons = reading.faults.summary or "the files contain no documents"
        raise UserError(f"nothing was learned: {reasons}; docs/operations.md lists the accepted formats")
    return Summary(sink.finish(), kinds, reading.faults, time.perf_counter() - began)


def read_all(
    files: Sequence[File], reading: Reading, kinds: Counter[str], convert: Callable[[list[Item], Reading], A]
) -> Generator[tuple[int, A], None, None]:
    """Yield, for each batch, the bytes read so far and what `convert` makes of its items, in threads."""

    def converted(batch: Batch) -> tuple[int, A]:
        return batch.bytes_read, convert(batch.items, reading)

    with (
        closing(prefetched(read_batches(files, reading, kinds), BATCHES_READ)) as batches,
        closing(mapped(converted, batches, TOKENIZERS)) as encoded,
    ):
        yield from prefetched(encoded, BATCHES_ENCODED)


def check_readable(reading: Reading, most: int) -> None:
    """Raise UserError if a load without a tokenizer finds only text; some text among token ids is only counted."""
    fault = reading.faults.by_reason.get(NO_TOKENIZER)
    if fault and fault.count >= most:
        raise UserError(f"{fault.places[0]} is text; give the folder of the model's tokenizer with --tokenizer FOLDER")


# --- Threads


class _End:
    """The end of the items, with the error if there was one."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(items: Iterable[A], most: int) -> Generator[A, None, None]:
    """Yield items that a separate thread fetches in advance, at most `most` + 1 of them.

    Errors of fetching are raised here. The thread ends when this iterator is closed.
    """
    queue: Queue[A | _End] = Queue(most)
    stopped = threading.Event()

    def fetch() -> None:
        end = _End(None)
        try:
            for item in items:
                queue.put(item)
                if stopped.is_set():
                    break
        except BaseException as error:
            end.error = error
        queue.put(end)

    thread = threading.Thread(target=fetch, name="warm-reader", daemon=True)
    thread.start()
    try:
        while not isinstance(item := queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        while thread.is_alive():
            with suppress(Empty):
                queue.get(timeout=PAUSE_S)


def mapped(function: Callable[[A], B], items: Iterable[A], workers: int) -> Generator[B, None, None]:
    """Yield `function` of each item, in order, computed by `workers` threads."""
    pending: deque[Future[B]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="warm-tokenizer") as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
