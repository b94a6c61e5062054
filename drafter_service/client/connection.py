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

ELSEWHERE = "give the address of a drafter, or start one at a free address: ssd-drafter serve --listen ADDRESS"
"""Advice for an address where a server of another kind listens."""

ABSENCES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Status codes when nothing answers at an address."""


class RefusedError(Exception):
    """The service refuses this client; the text is its reason."""


class AbsentError(UserError):
    """Raised if no service answers at an address, or one that is not ready yet."""


def check_address(address: str) -> None:
    """Raise AbsentError if no service listens at an address, UserError if it is not an address."""
    parsed = Address.parse(address)
    try:
        parsed.connect().close()
    except OSError as problem:
        raise AbsentError(absence(parsed.text, problem.strerror or str(problem))) from None
    if (other := find_other_server(address)) is not None:
        raise other


def find_other_server(address: str) -> AbsentError | None:
    """Return the error for an address where a server of another kind listens; None if none is recognized there."""
    kind = Address.parse(address).kind_of_other_server()
    return AbsentError(f"{kind} listens at {address}, not a drafter; {ELSEWHERE}") if kind else None


@dataclass(frozen=True)
class StreamEnd:
    """The end of a stream."""

    reason: str
    error: UserError
    """The error for an owner that requires the service."""
    is_final: bool = False
    """Whether the service refuses this client, so that reconnecting is useless."""


class ConnectionState:
    """Records whether a client is connected and decides when it reconnects; opens no connections."""

    def __init__(self, address: str, rng: Random) -> None:
        self._address = address
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

    def end_of(self, problem: Exception | str | None) -> StreamEnd:
        """Return the end of a stream with an exception, or for a reason; None: the service ended it normally."""
        reason, code = "it ended the stream" if problem is None else str(problem), None
        match problem:
            case None | str() | RefusedError() | UserError():
                pass
            case WireError():
                reason = f"it and this client disagree: {problem}"
            case grpc.RpcError():
                code = problem.code()
                reason = str(problem.details() or code.name)
                if code in ABSENCES and not reason.startswith(NOT_READY):
                    reason = system_error(reason)
            case OSError():
                reason = f"this process cannot connect: {problem.strerror or type(problem).__name__}"
            case _:
                # The text of an unexpected error may contain tokens of users.
                reason = f"this client failed: {type(problem).__name__}"
        is_final = isinstance(problem, RefusedError) or (self.lost is not None and code in REFUSALS)
        address = self._address
        error = UserError(f"the drafter at {address} does not serve this client: {reason}")
        if isinstance(problem, AbsentError):
            error = problem
        elif reason.startswith(NOT_READY):
            error = AbsentError(f"the drafter at {address} is {reason}")
        elif code in ABSENCES:
            error = AbsentError(absence(address, reason))
        elif code is grpc.StatusCode.UNIMPLEMENTED or isinstance(problem, WireError):
            error = UserError(f"something other than a drafter ({reason}) answers at {address}; {start_one(address)}")
        return StreamEnd(reason, error, is_final)

    @property
    def failure(self) -> UserError:
        """The error for an owner that requires the service."""
        if self.last_end is None:
            return AbsentError(absence(self._address, "there was no response in time"))
        return self.last_end.error
