"""The HTTP endpoint of the metrics, in separate threads."""

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

ANSWER_S = 5.0
"""Maximum time for the event loop to return the facts; Prometheus itself waits for 10 s."""
POLL_S = 0.1


class MetricsEndpoint:
    """Serves `/metrics` from `start` to `stop`."""

    def __init__(self, facts: Callable[[], ServiceFacts], address: str) -> None:
        """Make an endpoint that does not listen yet.

        facts: called in other threads; see `facts_from_loop`. Raises UserError if `address` is not HOST:PORT.
        """
        self.address = Address.parse(address)
        """After `start`, with the actual port."""
        if self.address.socket_path is not None:
            raise UserError(
                "reports.metrics: Prometheus reads from HOST:PORT, such as 127.0.0.1:9400, not from a socket"
            )
        self.registry = CollectorRegistry()
        self.registry.register(DrafterCollector(facts))
        ProcessCollector(registry=self.registry)
        self._server: _Server | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start serving. Raises UserError if the address cannot be used."""
        host, _, port = self.address.text.rpartition(":")
        try:
            self._server = _Server((host.strip("[]"), int(port)), _Handler.factory(self.registry))
        except OSError as problem:
            raise UserError(
                f"reports.metrics: cannot serve at {self.address.text}: {problem.strerror}; choose another address"
            ) from None
        self.address = self.address.at_port(self._server.server_address[1])
        self._thread = Thread(target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = self._thread = None


class _Handler(MetricsHandler):
    """Answers scrapes, and logs those that failed."""

    timeout = 10.0
    """Seconds to receive a request."""

    def do_GET(self) -> None:  # noqa: N802
        """Answer a scrape."""
        try:
            super().do_GET()
        except TimeoutError:
            # The base class would mistake this for a slow client and log nothing.
            logger.warning("metrics not sent: the service is busy")
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        logger.warning("metrics not sent", exc_info=True)


def facts_from_loop(loop: asyncio.AbstractEventLoop, facts: Callable[[], ServiceFacts]) -> Callable[[], ServiceFacts]:
    """Return a function for other threads that calls `facts` in the event loop, or raises TimeoutError."""

    async def answer() -> ServiceFacts:
        return facts()

    return lambda: asyncio.run_coroutine_threadsafe(answer(), loop).result(ANSWER_S)
