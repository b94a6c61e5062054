"""Identify the caller of a call and check its rights. The server does this before it looks anything up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

import grpc

from drafter_service.auth.callers import (
    EVERYBODY,
    AccessDeniedError,
    Caller,
    Callers,
    Right,
    UnauthenticatedError,
    read_callers,
    sha256_of,
)
from drafter_service.auth.watched import Watched
from drafter_service.settings.tree import AccessConfig

SAN = "x509_subject_alternative_name"
COMMON_NAME = "x509_common_name"
NO_TOKEN = "a bearer token is needed; give --token-file, `ClientAccess.token` or the metadata `authorization`"


class Context(Protocol):
    """The part of gRPC's `ServicerContext` that is used here."""

    def invocation_metadata(self) -> Any:
        """Return pairs of strings, or None."""

    def auth_context(self) -> Any:
        """Return the properties of the peer that TLS has verified."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call by raising an exception."""
        raise NotImplementedError


class AccessControl:
    """Checks the rights of callers.

    Without a callers file everybody who can connect has every right: whoever the permissions of the Unix socket admit,
    every user of the machine on loopback, and with `client_ca` every client with a certificate.
    """

    def __init__(self, config: AccessConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the callers file. Raises UserError if it is unusable; later invalid changes are logged and ignored."""
        self._callers: Watched[Callers] | None = None
        if config.callers is not None:
            read = partial(read_callers, config.callers, certificates=config.client_ca is not None)
            self._callers = Watched([config.callers], read, clock=clock)

    @asynccontextmanager
    async def authorize(self, context: Context) -> AsyncIterator[AuthorizedCall]:
        """Identify the caller. An AccessDeniedError, also one raised in the block, ends the call with its status."""
        try:
            yield AuthorizedCall(context, self._callers)
        except AccessDeniedError as denied:
            await context.abort(denied.code, str(denied))


class AuthorizedCall:
    """One call or stream and its caller. Rights are those in the callers file at the time of each check."""

    def __init__(self, context: Context, callers: Watched[Callers] | None) -> None:
        """Identify the caller. Raises UnauthenticatedError, also for malformed credentials."""
        given = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
        scheme, _, token = given[0].partition(" ") if given else ("bearer", "", "")
        if len(given) > 1 or scheme.lower() != "bearer" or bool(given) != bool(token):
            raise UnauthenticatedError("give one authorization of the form: Bearer TOKEN")
        self._token_sha256 = sha256_of(token) if token else None
        peer = context.auth_context()
        self._names = [name.decode(errors="replace") for key in (SAN, COMMON_NAME) for name in peer.get(key, ())]
        """Names in the certificate that TLS has verified: subject alternative names, then the common name."""
        self._callers = callers
        self._known: Callers | None = None
        self._caller = EVERYBODY
        self._update()

    @property
    def caller(self) -> Caller:
        """The caller. Raises UnauthenticatedError if it has been removed from the callers file."""
        self._update()
        return self._caller

    def require(self, right: Right, namespace: str) -> None:
        """Raise AccessDeniedError unless the caller has all of `right` in `namespace`, which need not exist."""
        self.caller.require(right, namespace)

    def _update(self) -> None:
        """Identify the caller if the callers file has changed. A token takes precedence over a certificate, valid or
        not."""
        if self._callers is None or (known := self._callers.current()) is self._known:
            return
        if self._token_sha256 is not None:
            caller, reason = known.with_token(self._token_sha256), "the bearer token is not known"
        else:
            caller = known.with_certificate(self._names)
            reason = "the certificate names no known caller" if self._names else NO_TOKEN
        if caller is None:
            raise UnauthenticatedError(reason)
        self._caller, self._known = caller, known
