"""Metrics over HTTP, in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from drafter_service.address import Address
from drafter_service.facts import ServiceFacts
from drafter_service.metrics.collector import DrafterCollector
from ssd.errors import UserError

MOST_NAMESPACES = 20
"""A namespace has about 170 series; 20 of them are read in some 10 ms, and a Prometheus server keeps them easily."""
ANSWER_S = 5.0
"""How long the event loop may take to say what it knows; Prometheus itself waits for 10 s."""


class MetricsEndpoint:
    """Serves `/metrics` from `start` to `stop`."""

    def __init__(
        self,
        facts: Callable[[], ServiceFacts],
        address: str,
        *,
        most_namespaces: int = MOST_NAMESPACES,
    ) -> None:
        """`facts` is called in other threads; see `asked_of`. At most `most_namespaces` are told apart.

        Raises UserError if `address` is not HOST:PORT.
        """
        self.address = Address.parse(address)
        """With the real port, once it serves."""
        if self.address.socket_path is not None:
            raise UserError(
                "reports.metrics: Prometheus reads from HOST:PORT, such as 127.0.0.1:9400, not from a socket"
            )
        self._registry = CollectorRegistry()
        self._registry.register(DrafterCollector(facts, most_namespaces))
        ProcessCollector(registry=self._registry)
        self._running: tuple[WSGIServer, Thread] | None = None

    def start(self) -> None:
        """Serve. Raises UserError if the address cannot be had."""
        host, _, port = self.address.text.rpartition(":")
        try:
            self._running = start_http_server(int(port), host.strip("[]"), self._registry)
        except OSError as problem:
            raise UserError(
                f"reports.metrics: cannot serve at {self.address.text}: {problem.strerror}; choose another address"
            ) from None
        self.address = self.address.at_port(self._running[0].server_port)

    def stop(self) -> None:
        """Serve no more."""
        if self._running is None:
            return
        server, thread = self._running
        self._running = None
        server.shutdown()
        server.server_close()
        thread.join()


def asked_of(loop: asyncio.AbstractEventLoop, facts: Callable[[], ServiceFacts]) -> Callable[[], ServiceFacts]:
    """`facts` for other threads, if only the loop's own may call it. Raises TimeoutError while the loop is stuck."""

    async def answer() -> ServiceFacts:
        return facts()

    return lambda: asyncio.run_coroutine_threadsafe(answer(), loop).result(ANSWER_S)
