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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.request import urlopen

import numpy as np

from benchmarks.cluster.nodes import HOST, PROBE_TIMEOUT_S
from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL

MAX_TOKENS = 64
REQUEST_TIMEOUT_S = 60.0
MAX_RUNNING = 64
MIXED_REQUESTS, MIXED_RATE, MIXED_SEED = 120, 2.5, 1
"""The mixed traffic, and its requests per second; it starts with empty corpora, so its steps are more than later."""
COUNTERS = ("vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
"""Both engines have these names."""


def mixed_prompts() -> list[str]:
    """Return prompts of which 30 % repeat an earlier one and 30 % do so with another beginning."""
    from engine.commands.compare.workload import make_workload

    return [item.prompt for item in make_workload(all_prompts(), MIXED_REQUESTS, MIXED_SEED)]


def all_prompts() -> list[str]:
    """Return the prompts of the shipped model."""
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
    """Sends completions of prompts to the engines at these ports."""

    def __init__(self, ports: Sequence[int], rate: float) -> None:
        """rate: requests per second."""
        self.records: list[Record] = []
        self._ports, self._rate = list(ports), rate
        self._outputs: dict[str, str] = {}
        self._lock = threading.Lock()
        self._sent = 0

    @property
    def failures(self) -> list[str]:
        """Why requests have failed, in order."""
        return [record.failure for record in self.records if record.failure]

    def run(self, prompts: Iterable[str], stopping: threading.Event | None = None) -> float:
        """Send requests for all prompts and wait for their outputs; send no more after `stopping` is set.

        Returns the tokens per step of the engines meanwhile, see `tokens_per_step`.
        """
        before, began = [read_totals(port) for port in self._ports], time.monotonic()
        stopping = stopping or threading.Event()
        with ThreadPoolExecutor(MAX_RUNNING) as pool:
            for number, prompt in enumerate(prompts):
                due = began + number / self._rate
                if stopping.wait(max(0.0, due - time.monotonic())):
                    break
                first, self._sent = self._sent % len(self._ports), self._sent + 1
                pool.submit(self._request, [*self._ports[first:], *self._ports[:first]], prompt, due)
        return tokens_per_step(before, [read_totals(port) for port in self._ports])

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


def read_totals(port: int) -> np.ndarray:
    """Return the output tokens of an engine and those that were drafted, float64 [2]; zeros if it does not answer."""
    try:
        with urlopen(f"http://{HOST}:{port}/metrics", timeout=PROBE_TIMEOUT_S) as answer:
            page = answer.read().decode()
    except (OSError, http.client.HTTPException):  # An engine that is killed may end its answer at any byte.
        return np.zeros(2)
    # Sums over the labels of a counter.
    found = (re.findall(rf"^{name}{{[^}}]*}} (\S+)", page, re.MULTILINE) for name in COUNTERS)
    return np.array([sum(map(float, values)) for values in found])


def tokens_per_step(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> float:
    """Return output tokens per step of a request, where each step gives one token more than were accepted.

    before, after: totals of each engine at two times, see `read_totals`. An engine whose totals are smaller afterwards
    has started again, and is counted from its start. 0 if there were no steps.
    """
    parts = [late - early if late[0] >= early[0] else late for early, late in zip(before, after, strict=True)]
    tokens, accepted = np.sum(parts, axis=0).tolist()
    return tokens / (tokens - accepted) if tokens > accepted else 0.0
