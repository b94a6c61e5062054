"""Metrics over HTTP, in threads of their own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector

from drafter_service.observability.facts import ServiceFacts
from drafter_service.observability.metrics.collector import DrafterCollector
from drafter_service.transport.address import Address
from ssd.errors import UserError

logger = structlog.get_logger(__name__)

MOST_NAMESPACES = 20
"""A namespace has about 170 series; 20 of them are read in some 30 ms, and a Prometheus server keeps them easily."""
ANSWER_S = 5.0
"""How long the event loop may take to say what it knows; Prometheus itself waits for 10 s."""
POLL_S = 0.1


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
        self.registry = CollectorRegistry()
        self.registry.register(DrafterCollector(facts, most_namespaces))
        ProcessCollector(registry=self.registry)
        self._server: _Server | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """Serve. Raises UserError if the address cannot be had."""
        host, _, port = self.address.text.rpartition(":")
        try:
            self._server = _Server((host.strip("[]"), int(port)), _PlainText.factory(self.registry))
        except OSError as problem:
            raise UserError(
                f"reports.metrics: cannot serve at {self.address.text}: {problem.strerror}; choose another address"
            ) from None
        self.address = self.address.at_port(self._server.server_address[1])
        self._thread = Thread(target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Serve no more."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = self._thread = None


class _PlainText(MetricsHandler):
    """Answers in Prometheus' own format to all: the library's OpenMetrics renames what has a colon in its name."""

    timeout = 10.0
    """Seconds, for a request to come."""

    def do_GET(self) -> None:  # noqa: N802
        """Answer a scrape."""
        del self.headers["Accept"]
        try:
            super().do_GET()
        except TimeoutError:
            # The base class would take it for a slow client, and say nothing.
            logger.warning("metrics not told: the service is busy")
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        logger.warning("metrics not told", exc_info=True)


def asked_of(loop: asyncio.AbstractEventLoop, facts: Callable[[], ServiceFacts]) -> Callable[[], ServiceFacts]:
    """`facts` for other threads, if only the loop's own may call it. Raises TimeoutError while the loop is stuck."""

    async def answer() -> ServiceFacts:
        return facts()

    return lambda: asyncio.run_coroutine_threadsafe(answer(), loop).result(ANSWER_S)
