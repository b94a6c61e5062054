"""The state of a client's connection: why it ended, when to connect again, and what is reported."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import grpc

from drafter_service.client.messages import RefusedError
from drafter_service.transport.wire import WireError
from ssd.errors import UserError

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0

GOOD_RESPONSES = 16
"""A stream with this many responses was useful: the next failure is a new one, with a short wait and a new message."""

REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Status codes before the handshake is done after which connecting again does not help."""

ABSENCES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Status codes when nothing answers at an address."""


@dataclass(frozen=True)
class StreamEnd:
    """Why a stream ended."""

    reason: str
    code: grpc.StatusCode | None = None
    is_final: bool = False
    """Whether the service does not serve this client."""
    is_violation: bool = False
    """Whether one side violated the protocol."""


class ConnectionState:
    """Whether a client is connected, and what follows when it is not. Opens no connection itself."""

    def __init__(self, rng: Random) -> None:
        self.lost: str | None = "it was not connected to yet"
        """Why there are no drafts now; None while there are."""
        self.last_end: StreamEnd | None = None
        """Why the last stream ended."""
        self._rng = rng
        self._responses = 0
        """On this stream."""
        self._failures = 0
        """Streams in a row that were not useful."""
        self._is_reported = False
        """Whether the present loss was reported to the owner."""

    def response_received(self) -> None:
        """Record a valid response."""
        self.lost = None
        self._responses += 1
        if self._responses == GOOD_RESPONSES:
            self._failures = 0
            self._is_reported = False

    def ended(self, end: StreamEnd) -> tuple[float | None, str | None]:
        """Record the end of a stream. Returns the seconds to wait before the next, None for ever, and what to report.

        The wait is a random part of an interval that doubles with each failure, so that the clients of a service that
        comes back do not all connect at once. What to report is the reason of a new loss, or None.
        """
        self._responses = 0
        self.last_end = end
        self.lost = end.reason
        report = None if self._is_reported else end.reason
        self._is_reported = True
        if end.is_final:
            return None, report
        interval = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._failures, 30))
        self._failures += 1
        return self._rng.uniform(0, interval), report

    def end_of(self, problem: Exception | None) -> StreamEnd:
        """Return what an exception says about the end of a stream; None: the service ended it normally."""
        if problem is None:
            return StreamEnd("it ended the stream")
        if isinstance(problem, RefusedError):
            return StreamEnd(str(problem), is_final=True)
        if isinstance(problem, WireError):
            return StreamEnd(f"it and this client disagree: {problem}", is_violation=True)
        if isinstance(problem, grpc.RpcError):
            code = problem.code()
            is_final = self.lost is not None and code in REFUSALS
            return StreamEnd(str(problem.details() or code.name), code, is_final=is_final)
        if isinstance(problem, UserError):
            return StreamEnd(str(problem))
        if isinstance(problem, OSError):
            return StreamEnd(f"this process cannot connect: {problem.strerror or type(problem).__name__}")
        # The text of an unexpected error may hold anything, tokens of users too.
        return StreamEnd(f"this client failed: {type(problem).__name__}")

    def failure(self, address: str) -> UserError:
        """Return the error for an owner that requires the service."""
        start_one = f"start one with: ssd-drafter serve --listen {address}"
        end = self.last_end
        if end is None or end.code in ABSENCES:
            return UserError(f"no drafter answers at {address}; {start_one}")
        if end.is_violation or end.code is grpc.StatusCode.UNIMPLEMENTED:
            return UserError(f"something other than a drafter ({end.reason}) answers at {address}; {start_one}")
        return UserError(f"the drafter at {address} does not serve this client: {end.reason}")
