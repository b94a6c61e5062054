"""Who makes a call, and whether they may: the server asks here before it looks anything up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import grpc

from drafter_service.auth.callers import Callers, read_callers, sha256_of
from drafter_service.auth.config import AccessConfig
from drafter_service.auth.rights import EVERYBODY, AccessDeniedError, Caller, Right, UnauthenticatedError
from drafter_service.auth.watched import Watched

SAN = "x509_subject_alternative_name"
COMMON_NAME = "x509_common_name"


class Context(Protocol):
    """What a call says of its caller, and how to end it: of gRPC's `ServicerContext`, that which is of use here."""

    def invocation_metadata(self) -> Any:
        """Pairs of strings, or None."""

    def auth_context(self) -> Any:
        """What TLS has verified."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call. Raises."""
        raise NotImplementedError


@dataclass(frozen=True)
class Presented:
    """What a call says of who makes it."""

    token_sha256: str | None
    certificate_names: tuple[str, ...]
    """Of a certificate that TLS has verified: subject alternative names, then the common name."""


class AccessControl:
    """The rights of all callers.

    Without a callers file everybody who can connect has every right: on a Unix socket file permissions decide who
    can, on loopback everybody on the machine, with `client_ca` those who have a certificate.
    """

    def __init__(self, config: AccessConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises UserError for a callers file that cannot be used; a later one that cannot be is logged and ignored."""
        self._callers: Watched[Callers] | None = None
        if config.callers is not None:
            read = partial(read_callers, config.callers, certificates=config.client_ca is not None)
            self._callers = Watched([config.callers], read, clock=clock)

    def caller_of(self, context: Context) -> Caller:
        """Raises UnauthenticatedError for a call by nobody that is known."""
        return self.visit(context).caller

    def visit(self, context: Context) -> Visit:
        """A call or stream, whose rights are those that the callers file gives at the time of each check.

        Raises UnauthenticatedError.
        """
        return Visit(presented_by(context), self._callers)

    @asynccontextmanager
    async def admit(self, context: Context) -> AsyncIterator[Visit]:
        """A visit; what it is refused, at the beginning or within the block, ends the call with the right status."""
        try:
            yield self.visit(context)
        except AccessDeniedError as denied:
            await context.abort(denied.code, str(denied))


class Visit:
    """One call or stream, and what it may do."""

    def __init__(self, presented: Presented, callers: Watched[Callers] | None) -> None:
        """Raises UnauthenticatedError."""
        self._presented = presented
        self._callers = callers
        self._known = None if callers is None else callers.current()
        self._caller = identify(presented, self._known)

    @property
    def caller(self) -> Caller:
        """Who it is now. Raises UnauthenticatedError if they are not known any more."""
        if self._callers is not None and (known := self._callers.current()) is not self._known:
            self._caller = identify(self._presented, known)
            self._known = known
        return self._caller

    def require(self, right: Right, namespace: str) -> None:
        """Raises AccessDeniedError unless the caller has all of `right` in `namespace`, which need not exist."""
        self.caller.require(right, namespace)


def presented_by(context: Context) -> Presented:
    """What a call presents. Raises UnauthenticatedError for credentials of a kind that nobody accepts."""
    given = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
    peer = context.auth_context()
    names = tuple(name.decode(errors="replace") for key in (SAN, COMMON_NAME) for name in peer.get(key, ()))
    if not given:
        return Presented(None, names)
    scheme, _, token = given[0].partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not token:
        raise UnauthenticatedError("give one authorization, of the form: Bearer TOKEN")
    return Presented(sha256_of(token), names)


def identify(presented: Presented, callers: Callers | None) -> Caller:
    """Who it is; a token, right or wrong, outweighs a certificate. Raises UnauthenticatedError."""
    if callers is None:
        return EVERYBODY
    if presented.token_sha256 is not None:
        caller = callers.with_token(presented.token_sha256)
        reason = "the bearer token is not known here"
    else:
        caller = callers.with_certificate(presented.certificate_names)
        named = presented.certificate_names
        reason = "the certificate names no caller known here" if named else "a bearer token is needed"
    if caller is None:
        raise UnauthenticatedError(reason)
    return caller
