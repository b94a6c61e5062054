"""What both clients have in common."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Protocol

from drafter_service.access.client import ClientAccess, Connector
from drafter_service.address import Address
from drafter_service.client.core import Core
from drafter_service.client.counters import Counters
from drafter_service.client.link import AHEAD, DEADLINE_S, PATIENCE_S, Link, Parting, hello_of

if TYPE_CHECKING:  # It brings numba with it.
    from drafter_service.facts import ModelIdentity


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
        ahead: int = AHEAD,
        model: ModelIdentity | None = None,
        namespace: str = "",
        access: ClientAccess | None = None,
        required: bool = True,
        on_lost: Callable[[str], None] = lambda _: None,
        rng: Random | None = None,
    ) -> None:
        """A client of the service at `address` that connects again whenever the connection is lost.

        deadline_s: longest wait for the drafts of a step. patience_s: after so long without an answer the connection is
        given up. ahead: how many tokens of a path to have at hand for later steps, 0 for none; a step is served from
        them only with a whole draft, so anything up to the engine's longest draft is of no use. model, namespace: what
        is served, and where it is remembered. access: how to connect, and as whom. required: raise UserError if no
        service answers or it refuses; otherwise there are no drafts until one does. on_lost: called with the reason,
        once for each time that drafts cease to come. rng: of the waits between attempts to connect.
        """
        self.address = Address.parse(address).text
        self._connector = Connector(Address.parse(address), access or ClientAccess())
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._on_lost = on_lost
        self._core = Core(hello_of(model, namespace), ahead=ahead)
        self._link = Link(self._core, rng)
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
    def counters(self) -> Counters:
        """Totals since the client began."""
        return self._core.counters

    @property
    def timeouts(self) -> int:
        """Steps that went without drafts because the service was late."""
        return self._core.counters.timeouts

    def _begin(self) -> None:
        raise NotImplementedError

    def _greet(self, call: Cancellable) -> None:
        """A stream was opened."""
        self._call, self._farewell = call, None
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
        wait_s, news = self._link.end(self._farewell or self._link.parting_of(problem))
        return wait_s, None if self._is_required or self._is_closing else news
