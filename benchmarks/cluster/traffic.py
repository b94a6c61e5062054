"""Requests to the engines at a constant rate, and the tokens per step that the engines count meanwhile.

Requests go to the engines in turn. At most `MAX_RUNNING` run at once. Further ones wait, and the wait is part of their
latency.
"""

from __future__ import annotations

import bisect
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.request import urlopen

import numpy as np

from benchmarks.cluster.nodes import HOST, PROBE_TIMEOUT_S
from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL

MAX_TOKENS = 64
REQUEST_TIMEOUT_S = 60.0
MAX_RUNNING = 64
ROUND = 41
"""Prompts of the repeated traffic. The number is odd, so that each engine gets each prompt in turn."""
RATE = 8.0
"""Requests per second of the repeated traffic: half of a core for engines that have learned it."""
MIXED_REQUESTS, MIXED_RATE, MIXED_SEED = 120, 2.5, 1
"""The mixed traffic starts with empty corpora, so its steps are more."""
COUNTERS = ("vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
"""Both engines have these names."""
BEFORE_WINDOWS = 3
"""Windows between samples before a fault with which those after it are compared."""
AFTER_WINDOWS = 2
"""Consecutive windows that together must be near the value before a fault, since single ones vary."""
TOLERANCE = 0.02


def mixed_prompts() -> list[str]:
    """Return prompts of which 30 % repeat an earlier one and 30 % do so with another beginning."""
    from engine.commands.compare.workload import make_workload

    return [item.prompt for item in make_workload(all_prompts(), MIXED_REQUESTS, MIXED_SEED)]


def all_prompts() -> list[str]:
    """Return the prompts of the shipped model; the first `ROUND` are those of the repeated traffic."""
    from engine.commands.prompts import read_texts

    return read_texts(SHIPPED_MODEL / PROMPTS_FILE)


class Record(NamedTuple):
    """A request that has ended."""

    due: float
    """When it was to be sent, on the monotonic clock."""
    seconds: float
    """From then until it ended."""
    failure: str
    """Why it failed; empty if it did not."""
    is_different: bool
    """Whether its output is not that of the first request with the same prompt."""


class Traffic:
    """Sends completions of prompts."""

    def __init__(self, ports: Sequence[int], rate: float, on_round: Callable[[], object] | None = None) -> None:
        """ports: of the engines. rate: requests per second. on_round: called with every `ROUND` th request."""
        self.records: list[Record] = []
        self._ports, self._rate, self._on_round = list(ports), rate, on_round
        self._outputs: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def failures(self) -> list[str]:
        """Why requests have failed, in order."""
        return [record.failure for record in self.records if record.failure]

    def run(self, prompts: Iterable[str], stopping: threading.Event) -> None:
        """Send requests for all prompts and wait for their outputs; send no more after `stopping` is set."""
        began = time.monotonic()
        with ThreadPoolExecutor(MAX_RUNNING) as pool:
            for number, prompt in enumerate(prompts):
                due = began + number / self._rate
                if stopping.wait(max(0.0, due - time.monotonic())):
                    break
                if number % ROUND == 0 and self._on_round is not None:
                    pool.submit(self._on_round)
                first = number % len(self._ports)
                pool.submit(self._request, [*self._ports[first:], *self._ports[:first]], prompt, due)

    def _request(self, ports: Sequence[int], prompt: str, due: float) -> None:
        output, failure = "", ""
        try:
            output = complete(ports, prompt)
        except (OSError, http.client.HTTPException, ValueError) as problem:
            failure = f"{type(problem).__name__}: {problem}"
        seconds = time.monotonic() - due
        with self._lock:
            is_different = not failure and self._outputs.setdefault(prompt, output) != output
            self.records.append(Record(due, seconds, failure, is_different))


def complete(ports: Sequence[int], prompt: str) -> str:
    """Return the greedy completion of a prompt by the first engine that answers.

    The next engine is asked if one refuses or ends the connection, or is loading its model (status 503). Raises
    OSError, HTTPException or ValueError if none answers.
    """
    others = ports[1:]
    connection = http.client.HTTPConnection(HOST, ports[0], timeout=REQUEST_TIMEOUT_S)
    body = {"model": SHIPPED_MODEL.name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    except ConnectionError:
        if not others:
            raise
        return complete(others, prompt)
    finally:
        connection.close()
    if answer.status == 503 and others:
        return complete(others, prompt)
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {content[:200].decode(errors='replace')}")
    return json.loads(content)["choices"][0]["text"]


def read_totals(port: int) -> np.ndarray | None:
    """Return the output tokens of an engine and those that were drafted, float64 [2]; None if it does not answer."""
    try:
        with urlopen(f"http://{HOST}:{port}/metrics", timeout=PROBE_TIMEOUT_S) as answer:
            page = answer.read().decode()
    except (OSError, http.client.HTTPException):  # An engine that is killed may end its answer at any byte.
        return None
    # Sums over the labels of a counter.
    found = (re.findall(rf"^{name}{{[^}}]*}} (\S+)", page, re.MULTILINE) for name in COUNTERS)
    return np.array([sum(map(float, values)) for values in found])


def tokens_per_step(totals: np.ndarray) -> float | None:
    """Return output tokens per step of a request, where each step gives one token more than were accepted; None if
    there were none.

    totals: output tokens and accepted draft tokens, float64 [2] or [engines, 2].
    """
    tokens, accepted = np.reshape(totals, (-1, 2)).sum(axis=0).tolist()
    return tokens / (tokens - accepted) if tokens > accepted else None


class Meter:
    """Takes samples of the engines at these ports. Several threads may use it."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._read = np.zeros((len(ports), 2))
        self._lock = threading.Lock()
        self.times: list[float] = []
        """Time of each sample, on the monotonic clock: about one for each round of the traffic."""
        self.totals: list[np.ndarray] = []
        """Output tokens and accepted draft tokens so far, float64 [engines, 2] for each sample."""

    def sample(self) -> None:
        """Read the totals."""
        with self._lock:
            now, totals = time.monotonic(), self.totals[-1].copy() if self.totals else np.zeros_like(self._read)
            for engine, port in enumerate(self._ports):
                found = read_totals(port)
                if found is not None:  # Otherwise it is counted later, or has lost its counts.
                    is_same = found[0] >= self._read[engine, 0]
                    totals[engine] += found - self._read[engine] if is_same else found
                    self._read[engine] = found
            self.totals.append(totals)
            self.times.append(now)


class Recovery(NamedTuple):
    """How tokens per step changed with a fault."""

    before: float
    lowest: float
    """The lowest between two samples from the fault until the recovery."""
    after: float
    """Tokens per step in the windows that show the recovery, or in the last ones."""
    seconds: float | None
    """From the end of the fault to the first sample after which they are as before; None if there is none."""
    ratio: float
    """Tokens per step after the fault, relative to those before it."""


def recovery(
    times: Sequence[float], totals: Sequence[np.ndarray], fault_at: float, healed_at: float
) -> Recovery | None:
    """Return how tokens per step recovered; None if there are too few samples. times, totals: as in `Meter`."""

    def rate(first: int, last: int) -> float:
        return tokens_per_step(totals[last] - totals[first]) or 0.0

    last_before = bisect.bisect_right(times, fault_at) - 1
    before = rate(max(0, last_before - BEFORE_WINDOWS), last_before)
    healed = bisect.bisect_left(times, healed_at)
    rates = {at: rate(at, at + AFTER_WINDOWS) for at in range(healed, len(times) - AFTER_WINDOWS)}
    if not before or not rates:
        return None
    at = next((at for at, after in rates.items() if after >= (1 - TOLERANCE) * before), None)
    shown = max(rates) if at is None else at
    lowest = min(rate(window, window + 1) for window in range(last_before, shown + 1))
    seconds = None if at is None else times[at + 1] - healed_at
    return Recovery(before, lowest, rates[shown], seconds, rates[shown] / before)
