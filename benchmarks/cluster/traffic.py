"""Requests to the router at a constant rate.

At most `MAX_RUNNING` run at once. Further ones wait, and the wait is part of their latency.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.cluster.engines import MODEL, NAME

HOST = "127.0.0.1"
MAX_TOKENS = 64
REQUEST_TIMEOUT_S = 60.0
MAX_RUNNING = 64
ROUND = 41
"""Prompts of the repeated traffic. The number is odd, so that each engine gets each prompt in turn."""
RATE = 8.0
"""Requests per second of the repeated traffic: half of a core for engines that have learned it."""
MIXED_REQUESTS, MIXED_RATE, MIXED_SEED = 120, 2.5, 1
"""The mixed traffic starts with empty corpora, so its steps are more."""


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

    def __init__(self, port: int, rate: float, on_round: Callable[[], object] | None = None) -> None:
        """port: of the router. rate: requests per second. on_round: called with every `ROUND` th request."""
        self.records: list[Record] = []
        self._port, self._rate, self._on_round = port, rate, on_round
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
                pool.submit(self._request, prompt, due)

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

    def _request(self, prompt: str, due: float) -> None:
        output, failure = "", ""
        try:
            output = complete(self._port, prompt)
        except (OSError, http.client.HTTPException, ValueError) as problem:
            failure = f"{type(problem).__name__}: {problem}"
        seconds = time.monotonic() - due
        with self._lock:
            is_different = not failure and self._outputs.setdefault(prompt, output) != output
            self.records.append(Record(due, seconds, failure, is_different))


def complete(port: int, prompt: str) -> str:
    """Return the greedy completion of a prompt. Raises OSError, HTTPException or ValueError if there is none."""
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_TIMEOUT_S)
    body = {"model": NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {content[:200].decode(errors='replace')}")
    return json.loads(content)["choices"][0]["text"]


def mixed_prompts() -> list[str]:
    """Return prompts of which 30 % repeat an earlier one and 30 % do so with another beginning."""
    from engine.commands.demo.workload import make_workload

    return [item.prompt for item in make_workload(_prompts(), MIXED_REQUESTS, MIXED_SEED)]


def round_prompts() -> list[str]:
    """Return the prompts of the repeated traffic."""
    return _prompts()[:ROUND]


def _prompts() -> list[str]:
    from engine.commands.prompts import read_texts

    return read_texts(MODEL / "prompts.jsonl")
