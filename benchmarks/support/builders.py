"""Sort a whole corpus with the index's kernel, and with pydivsufsort, a binding of the C library libdivsufsort."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from benchmarks.support.resources import forget_peak, peak_bytes, resident_bytes
from ssd.config import DrafterConfig
from ssd.corpus.memory import trim_heap
from ssd.corpus.ring import SEPARATOR, Ring
from ssd.corpus.suffix_array import usable_positions
from ssd.corpus.threads import sort_in_threads

Builder = Callable[[Ring], np.ndarray]
"""Sorts the positions of a ring that has not wrapped, uint32 [N]."""
WAKE_S = 0.001
"""Interval at which another thread takes the GIL."""


def build_ssd(ring: Ring) -> np.ndarray:
    """Sort by 32 tokens, as the index does."""
    positions = np.empty(ring.head, np.uint32)
    size = usable_positions(ring.address, 0, ring.head, ring.capacity, positions.ctypes.data)
    sort_in_threads(ring.address, positions.ctypes.data, size, DrafterConfig.match_depth)
    return positions[:size]


def build_pydivsufsort(ring: Ring) -> np.ndarray:
    """Sort whole suffixes of the reversed text, with a separator before its first token as in the ring."""
    from pydivsufsort import divsufsort

    backwards = np.append(ring.slots[: ring.head][::-1], SEPARATOR)
    is_separator = backwards == SEPARATOR
    # The library sorts the bytes of tokens, and takes two for each if ids span at most 16 bits.
    backwards[is_separator] = backwards[~is_separator].max() + 1
    suffixes = divsufsort(backwards)
    return (ring.head - suffixes[~is_separator[suffixes] & (suffixes > 0)]).astype(np.uint32)


BUILDERS: Mapping[str, Builder] = {"ssd": build_ssd, "pydivsufsort": build_pydivsufsort}


class Delays(threading.Thread, AbstractContextManager["Delays"]):
    """Measures by how much another Python thread, which sleeps for `WAKE_S` again and again, is woken too late."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds: list[float] = []
        self._is_done = False

    def run(self) -> None:
        """Sleep and measure until the context ends."""
        while not self._is_done:
            began = time.perf_counter()
            time.sleep(WAKE_S)
            self.seconds.append(time.perf_counter() - began - WAKE_S)

    def __enter__(self) -> Delays:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done = True
        self.join()


def compare_builders(names: Sequence[str], requests: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
    """Return the figures of each builder. Raises AssertionError if they sort differently.

    bytes_per_token: peak beyond the text. delay_ms_max, delay_ms_p99: of another Python thread; `idle` has the delays
    without a builder, which are due to other processes.
    """
    ring = Ring(sum(map(len, requests)) + len(requests))
    ring.write(np.concatenate([part for request in requests for part in (request, np.full(1, SEPARATOR))]))
    with Delays() as delays:
        time.sleep(2.0)
    results = {"idle": _delay_figures(delays)}
    orders = []
    for name in names:
        gc.collect()
        trim_heap()
        before = resident_bytes()
        forget_peak()
        began, cpu_began = time.perf_counter(), time.process_time()
        with Delays() as delays:
            orders.append(BUILDERS[name](ring))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        results[name] = {
            "seconds": round(seconds, 2),
            "cpu_s": round(cpu_seconds, 2),
            "bytes_per_token": round((peak_bytes() - before) / ring.head, 1),
            **_delay_figures(delays),
        }
    _check_order(ring, orders)
    return results


def _delay_figures(delays: Delays) -> dict[str, float]:
    p99, largest = 1e3 * np.percentile(delays.seconds, [99, 100])
    return {"delay_ms_p99": round(float(p99), 1), "delay_ms_max": round(float(largest), 1)}


def _check_order(ring: Ring, orders: Sequence[np.ndarray]) -> None:
    """Raise AssertionError unless all orders have the same keys; only equal keys may be in another order."""
    alive = np.ones(len(orders[0]), bool)
    for depth in range(DrafterConfig.match_depth):
        first, *others = (ring.slots[order.astype(np.int64) - 1 - depth] for order in orders)
        for other in others:
            assert ((first == other) | ~alive).all(), f"another token at a distance of {depth}"
        alive &= first != SEPARATOR
