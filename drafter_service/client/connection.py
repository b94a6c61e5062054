"""State of a client's connection: the reason for its loss, when to reconnect, and what to report."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import grpc

from drafter_service.transport.address import NOT_READY, Address, absence, start_one, system_error
from drafter_service.transport.wire import WireError
from ssd.errors import UserError

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0

GOOD_RESPONSES = 16
"""A stream with this many responses was useful: the next failure is reported, and its first wait is short."""

REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Status codes of a handshake after which reconnecting does not help."""

ABSENCES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Status codes when nothing answers at an address."""


class RefusedError(Exception):
    """The service refuses this client; the text is its reason."""


class AbsentError(UserError):
    """Raised if no service answers at an address, or one that is not ready yet."""


def check_address(address: str) -> None:
    """Raise AbsentError if nothing listens at an address of a service, UserError if it is not an address."""
    parsed = Address.parse(address)
    if (reason := parsed.find_listener()) is not None:
        raise AbsentError(absence(parsed.text, reason))


@dataclass(frozen=True)
class StreamEnd:
    """The end of a stream and its reason."""

    reason: str
    code: grpc.StatusCode | None = None
    is_final: bool = False
    """Whether the service refuses this client, so that reconnecting is useless."""
    is_violation: bool = False
    """Whether one side violated the protocol."""


class ConnectionState:
    """Records whether a client is connected and decides when it reconnects; opens no connections."""

    def __init__(self, rng: Random) -> None:
        self.lost: str | None = "there was no connection yet"
        """Reason why there are no drafts; None while connected."""
        self.last_end: StreamEnd | None = None
        """End of the last stream."""
        self._rng = rng
        self._responses = 0
        """Number of responses on this stream."""
        self._failures = 0
        """Number of consecutive streams that were not useful."""
        self._is_reported = False
        """Whether the current loss was reported."""
        self._has_resumed = False
        """Whether a reported loss is over, which was not reported yet."""

    def response_received(self) -> None:
        """Record a valid response."""
        self.lost = None
        self._responses += 1
        if self._responses == GOOD_RESPONSES:
            self._failures = 0
            self._has_resumed |= self._is_reported
            self._is_reported = False

    def take_resumption(self) -> bool:
        """Return whether a loss that was reported is over, once for each."""
        has_resumed, self._has_resumed = self._has_resumed, False
        return has_resumed

    def ended(self, end: StreamEnd) -> tuple[float | None, str | None]:
        """Record the end of a stream; return the seconds before the next one, and the reason to report.

        None as seconds: do not reconnect. None as reason: this loss was reported before. The wait is a random part of
        an interval that doubles with each failure, so that clients of a restarted service do not connect all at once.
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
        """Return the end of a stream with an exception; None: the service ended it normally."""
        if problem is None:
            return StreamEnd("it ended the stream")
        if isinstance(problem, RefusedError):
            return StreamEnd(str(problem), is_final=True)
        if isinstance(problem, WireError):
            return StreamEnd(f"it and this client disagree: {problem}", is_violation=True)
        if isinstance(problem, grpc.RpcError):
            code = problem.code()
            is_final = self.lost is not None and code in REFUSALS
            details = str(problem.details() or code.name)
            if code is grpc.StatusCode.UNAVAILABLE and not details.startswith(NOT_READY):
                details = system_error(details)
            return StreamEnd(details, code, is_final=is_final)
        if isinstance(problem, UserError):
            return StreamEnd(str(problem))
        if isinstance(problem, OSError):
            return StreamEnd(f"this process cannot connect: {problem.strerror or type(problem).__name__}")
        # The text of an unexpected error may contain tokens of users.
        return StreamEnd(f"this client failed: {type(problem).__name__}")

    def failure(self, address: str) -> UserError:
        """Return the error for an owner that requires the service."""
        end = self.last_end
        if end is not None and end.reason.startswith(NOT_READY):
            return AbsentError(f"the drafter at {address} is {end.reason}")
        if end is None or end.code in ABSENCES:
            return AbsentError(absence(address, end.reason if end else "there was no response in time"))
        if end.is_violation or end.code is grpc.StatusCode.UNIMPLEMENTED:
            return UserError(
                f"something other than a drafter ({end.reason}) answers at {address}; {start_one(address)}"
            )
        return UserError(f"the drafter at {address} does not serve this client: {end.reason}")
