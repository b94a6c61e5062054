"""What both clients have in common."""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Protocol

import grpc
import structlog

from drafter_service.auth.connector import ClientAccess, Connector
from drafter_service.client.core import Core
from drafter_service.client.counters import Counters
from drafter_service.client.link import DEADLINE_S, PATIENCE_S, Link, Parting, hello_of
from drafter_service.client.messages import RefusedError
from drafter_service.transport.address import Address
from drafter_service.transport.wire import WireError
from ssd.errors import UserError

if TYPE_CHECKING:  # It brings numba with it.
    from drafter_service.observability.facts import ModelIdentity

logger = structlog.get_logger(__name__)

EXPECTED = (grpc.RpcError, RefusedError, WireError, UserError)
"""Ways in which streams end."""


class Cancellable(Protocol):
    """A stream that is open."""

    def cancel(self) -> object:
        """Break it off."""


class Client:
    """A drafter behind a gRPC stream."""

    def __init__(
        self,
        address: str,
        *,
        deadline_s: float = DEADLINE_S,
        patience_s: float = PATIENCE_S,
        model: ModelIdentity | None = None,
        namespace: str = "",
        access: ClientAccess | None = None,
        required: bool = True,
        on_lost: Callable[[str], None] = lambda _: None,
        rng: Random | None = None,
    ) -> None:
        """A client of the service at `address` that connects again whenever the connection is lost.

        deadline_s: longest wait for the drafts of a step. patience_s: a connection on which a response is outstanding
        for longer is closed and made again. model, namespace: what is served, and which corpus remembers it. access:
        TLS files and bearer token. required: raise UserError if no service answers or it refuses; otherwise there are
        no drafts until one does. on_lost: called with the reason, once for each time that drafts cease to come. rng:
        source of the random waits between attempts to connect.
        """
        self.address = Address.parse(address).text
        self._connector = Connector(Address.parse(address), access or ClientAccess())
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._on_lost = on_lost
        self._core = Core(hello_of(model, namespace))
        self._link = Link(self._core, rng)
        self._process = os.getpid()
        self._is_required = required
        self._is_closing = False
        self._call: Cancellable | None = None
        self._farewell: Parting | None = None
        """Why this client itself ended the stream."""
        self._begin()

    @property
    def lost(self) -> str | None:
        """Why there is no connection; None while there is one."""
        return self._link.lost

    @property
    def transport(self) -> str:
        """What the connection goes over: "socket", the socket for steps, or "grpc"; empty while there is none."""
        return self._core.counters.transport

    @property
    def counters(self) -> Counters:
        """Totals since the client began."""
        return self._core.counters

    @property
    def timeouts(self) -> int:
        """Steps that went without drafts because the service was late."""
        return self._core.counters.timeouts

    def _begin(self) -> None:
        raise NotImplementedError

    @property
    def _is_fork(self) -> bool:
        """Whether this process is another than the one that connected."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        """Raises UserError in a fork: what it said would get between what its parent says."""
        if self._is_fork:
            raise UserError(f"this client belongs to process {self._process}; make another one in each process")

    def _greet(self, call: Cancellable, transport: str) -> None:
        """A stream was opened."""
        self._call, self._farewell = call, None
        self._core.counters.transport = transport
        self._core.greet()

    def _mind_silence(self) -> None:
        """Give up a connection that stands and says nothing."""
        silent_s = self._core.dialogue.silent_s
        if silent_s > self._patience_s:
            self._leave(Parting(f"it has not answered for {silent_s:.0f} s"))

    def _leave(self, farewell: Parting) -> None:
        """End the stream from this side."""
        if self._farewell is None:
            self._farewell = farewell
            self._cancel()

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _end(self, problem: Exception | None) -> tuple[float | None, str | None]:
        """A stream has ended: how many seconds until the next one, None for ever; and news for the owner."""
        self._call = None
        self._core.counters.transport = ""
        if problem is not None and not isinstance(problem, EXPECTED):
            logger.warning("the connection to the drafter failed", problem=type(problem).__name__)
        wait_s, news = self._link.end(self._farewell or self._link.parting_of(problem))
        return wait_s, None if self._is_required or self._is_closing else news

    def _tell_owner(self, news: str) -> None:
        """Call `on_lost`. Whatever it raises is not this client's."""
        try:
            self._on_lost(news)
        except Exception as problem:
            logger.error("on_lost raised", problem=type(problem).__name__)
