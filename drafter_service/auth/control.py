"""Identify the caller of a call and check its rights. The server does this before it looks anything up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Credentials:
    """Credentials of a call."""

    token_sha256: str | None
    certificate_names: tuple[str, ...]
    """Names in the certificate that TLS has verified: subject alternative names, then the common name."""


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
            yield AuthorizedCall(credentials_of(context), self._callers)
        except AccessDeniedError as denied:
            await context.abort(denied.code, str(denied))


class AuthorizedCall:
    """One call or stream and its caller. Rights are those in the callers file at the time of each check."""

    def __init__(self, credentials: Credentials, callers: Watched[Callers] | None) -> None:
        """Identify the caller. Raises UnauthenticatedError."""
        self._credentials = credentials
        self._callers = callers
        self._known = None if callers is None else callers.current()
        self._caller = identify(credentials, self._known)

    @property
    def caller(self) -> Caller:
        """The caller. Raises UnauthenticatedError if it has been removed from the callers file."""
        if self._callers is not None and (known := self._callers.current()) is not self._known:
            self._caller = identify(self._credentials, known)
            self._known = known
        return self._caller

    def require(self, right: Right, namespace: str) -> None:
        """Raise AccessDeniedError unless the caller has all of `right` in `namespace`, which need not exist."""
        self.caller.require(right, namespace)


def credentials_of(context: Context) -> Credentials:
    """Return the credentials of a call. Raises UnauthenticatedError for malformed ones."""
    given = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
    peer = context.auth_context()
    names = tuple(name.decode(errors="replace") for key in (SAN, COMMON_NAME) for name in peer.get(key, ()))
    if not given:
        return Credentials(None, names)
    scheme, _, token = given[0].partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not token:
        raise UnauthenticatedError("give one authorization of the form: Bearer TOKEN")
    return Credentials(sha256_of(token), names)


def identify(credentials: Credentials, callers: Callers | None) -> Caller:
    """Return the caller. A token takes precedence over a certificate, valid or not. Raises UnauthenticatedError."""
    if callers is None:
        return EVERYBODY
    if credentials.token_sha256 is not None:
        caller = callers.with_token(credentials.token_sha256)
        reason = "the bearer token is not known"
    else:
        caller = callers.with_certificate(credentials.certificate_names)
        has_certificate = bool(credentials.certificate_names)
        reason = "the certificate names no known caller" if has_certificate else NO_TOKEN
    if caller is None:
        raise UnauthenticatedError(reason)
    return caller
