"""Requests to the engines at a constant rate, and the tokens per step that the engines count meanwhile.

Requests go to the engines in turn. At most `MAX_RUNNING` run at once. Further ones wait, and the wait is part of their
latency.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple
from urllib.request import urlopen

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
"""Windows before a fault with which those after it are compared."""
AFTER_WINDOWS = 2
"""Consecutive windows that together must be near the value before a fault, since single ones vary."""
TOLERANCE = 0.02


def mixed_prompts() -> list[str]:
    """Return prompts of which 30 % repeat an earlier one and 30 % do so with another beginning."""
    from engine.commands.demo.workload import make_workload

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
    """Sends completions of prompts, in threads of its own."""

    def __init__(self, ports: Sequence[int], rate: float, on_round: Callable[[], object] | None = None) -> None:
        """ports: of the engines. rate: requests per second. on_round: called with every `ROUND` th request."""
        self.records: list[Record] = []
        self._ports, self._rate, self._on_round = list(ports), rate, on_round
        self._outputs: dict[str, str] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    @property
    def failures(self) -> list[str]:
        """Why requests have failed, in order."""
        return [record.failure for record in self.records if record.failure]

    def run(self, prompts: Iterable[str]) -> None:
        """Send requests for all prompts and wait for their outputs, or until `running` ends."""
        began = time.monotonic()
        with ThreadPoolExecutor(MAX_RUNNING) as pool:
            for number, prompt in enumerate(prompts):
                due = began + number / self._rate
                if self._stopping.wait(max(0.0, due - time.monotonic())):
                    break
                if number % ROUND == 0 and self._on_round is not None:
                    pool.submit(self._on_round)
                first = number % len(self._ports)
                pool.submit(self._request, [*self._ports[first:], *self._ports[:first]], prompt, due)

    @contextmanager
    def running(self, prompts: Iterable[str]) -> Iterator[None]:
        """Send requests in the background."""
        thread = threading.Thread(target=self.run, args=(prompts,), name="traffic")
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()

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
    """Return the greedy completion of a prompt by the first of some engines that does not refuse or end the connection.

    Raises OSError, HTTPException or ValueError if there is none.
    """
    connection = http.client.HTTPConnection(HOST, ports[0], timeout=REQUEST_TIMEOUT_S)
    body = {"model": SHIPPED_MODEL.name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    except ConnectionError:
        if len(ports) == 1:
            raise
        return complete(ports[1:], prompt)
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {content[:200].decode(errors='replace')}")
    return json.loads(content)["choices"][0]["text"]


class Totals(NamedTuple):
    """Counts of an engine since it started, or during a period."""

    tokens: float
    """Output tokens."""
    accepted: float
    """Draft tokens that were accepted."""

    def since(self, earlier: Totals) -> Totals:
        """Return what was counted after `earlier`; everything, if the engine has started again in between."""
        if self.tokens < earlier.tokens:
            return self
        return Totals(*(now - then for now, then in zip(self, earlier, strict=True)))


NOTHING = Totals(0, 0)


def tokens_per_step(parts: Iterable[Totals]) -> float | None:
    """Return output tokens per step of a request, where each step gives one token more than were accepted; None if
    there were none.
    """
    tokens, accepted = map(sum, zip(NOTHING, *parts, strict=True))
    return tokens / (tokens - accepted) if tokens > accepted else None


def read_totals(port: int) -> Totals | None:
    """Return the totals of the engine at a port; None if it does not answer."""
    try:
        with urlopen(f"http://{HOST}:{port}/metrics", timeout=PROBE_TIMEOUT_S) as answer:
            page = answer.read().decode()
    except (OSError, http.client.HTTPException):  # An engine that is killed may end its answer at any byte.
        return None
    # Sums over the labels of a counter.
    found = (re.findall(rf"^{name}{{[^}}]*}} (\S+)", page, re.MULTILINE) for name in COUNTERS)
    return Totals(*(sum(map(float, values)) for values in found))


class Window(NamedTuple):
    """The period between two samples: about one round of the traffic."""

    began: float
    """Time on the monotonic clock."""
    ended: float
    totals: tuple[Totals, ...]
    """By engine; zeros for one that did not answer."""

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per step of all engines."""
        return tokens_per_step(self.totals)


class Meter:
    """Takes samples of the engines at these ports. Several threads may use it."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._last: list[Totals] | None = None
        self._last_time = 0.0
        self._lock = threading.Lock()
        self.windows: list[Window] = []

    def sample(self) -> None:
        """Read the totals, and add the window since the last sample."""
        with self._lock:
            now = time.monotonic()
            read = [read_totals(port) for port in self._ports]
            last = self._last or [NOTHING] * len(read)
            # An engine that does not answer is counted later, or has lost its counts.
            known = [then if total is None else total for total, then in zip(read, last, strict=True)]
            if self._last is not None:
                parts = tuple(total.since(then) for total, then in zip(known, last, strict=True))
                self.windows.append(Window(self._last_time, now, parts))
            self._last, self._last_time = known, now


class Recovery(NamedTuple):
    """How tokens per step changed with a fault."""

    before: float
    lowest: float
    """The lowest of a single window from the fault until the recovery."""
    after: float
    """Tokens per step in the windows that show the recovery, or in the last ones."""
    seconds: float | None
    """From the end of the fault to the end of the window that shows the recovery; None if there was none."""
    ratio: float
    """Tokens per step after the fault, relative to those before it."""


def recovery(windows: Sequence[Window], fault_at: float, healed_at: float) -> Recovery | None:
    """Return how tokens per step recovered; None if there are too few windows."""
    before = [window for window in windows if window.ended <= fault_at][-BEFORE_WINDOWS:]
    later = [window for window in windows if window.ended > fault_at and window.tokens_per_step is not None]
    pairs = [
        later[at : at + AFTER_WINDOWS] for at in range(len(later) - AFTER_WINDOWS + 1) if later[at].began >= healed_at
    ]
    expected = _mean(before)
    if expected is None or not pairs:
        return None
    shown = next((pair for pair in pairs if (_mean(pair) or 0) >= (1 - TOLERANCE) * expected), None)
    pair = shown or pairs[-1]
    until, after = pair[0].ended, _mean(pair) or 0.0
    lowest = min(window.tokens_per_step or 0.0 for window in later if window.ended <= until)
    return Recovery(expected, lowest, after, until - healed_at if shown else None, after / expected)


def _mean(windows: Sequence[Window]) -> float | None:
    return tokens_per_step(total for window in windows for total in window.totals)
