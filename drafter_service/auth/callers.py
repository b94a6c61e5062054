"""Callers of the service, the file that lists them, and checks of their rights in namespaces.

    [[caller]]
    name = "team-a"
    token_sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    namespaces = ["team-a-*"]
    rights = ["read", "learn"]

    [[caller]]
    name = "operations"
    certificate = "ops.example.org"
    namespaces = ["*"]
    rights = ["admin"]

`certificate` is the common name or a subject alternative name (DNS, URI, e-mail, address) of a client certificate.
Several entries may have the same name, so that a token can be replaced while the old one is still valid. The file only
contains hashes of tokens; they are safe because tokens are long and random, as `ssd-drafter token` makes them.

A check depends only on the caller's rights and the requested name, and precedes every lookup. So neither the text nor
the duration of a refusal reveals whether a namespace exists."""

from __future__ import annotations

import hashlib
import hmac
import stat
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Flag, auto
from fnmatch import fnmatchcase
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Protocol

import grpc
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from drafter_service.auth.watched import CHECK_INTERVAL_S, Watched, read_file
from drafter_service.settings.tree import AccessConfig
from ssd.errors import UserError

MAX_NAME_SHOWN = 80
"""Maximum number of characters of a namespace's name in an error."""

RightName = Literal["read", "learn", "admin"]
Printable = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


# --- Rights


class Right(Flag):
    """A right to a namespace. Rights are independent: ADMIN alone does not include drafting."""

    READ = auto()
    """Draft from it, and read its statistics."""
    LEARN = auto()
    """Add text to it."""
    ADMIN = auto()
    """Forget text, drop it, and snapshot it."""


EVERY_RIGHT = Right.READ | Right.LEARN | Right.ADMIN


class UnauthenticatedError(Exception):
    """The caller is unknown."""


class PermissionDeniedError(Exception):
    """The caller is known and does not have the right."""


@dataclass(frozen=True)
class Caller:
    """A caller with the same rights in all namespaces that match one of its patterns."""

    name: str
    namespaces: tuple[str, ...]
    """Shell patterns, such as `team-a-*`; they are case-sensitive."""
    rights: Right

    def may(self, right: Right, namespace: str) -> bool:
        """Return whether the caller has all of `right` in `namespace`, which need not exist."""
        return right in self.rights and any(fnmatchcase(namespace, pattern) for pattern in self.namespaces)

    def require(self, right: Right, namespace: str) -> None:
        """Raise PermissionDeniedError unless the caller has all of `right` in `namespace`."""
        if not self.may(right, namespace):
            shown = ascii(namespace[:MAX_NAME_SHOWN])
            wanted = "/".join(str(part.name).lower() for part in right)
            raise PermissionDeniedError(f"caller {self.name!a} has no {wanted} right to namespace {shown}")


EVERYBODY = Caller("everybody", ("*",), EVERY_RIGHT)
"""The caller of every call if there is no callers file."""


# --- The callers file


class Entry(BaseModel):
    """One `[[caller]]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Printable
    namespaces: Annotated[list[Printable], Field(min_length=1)]
    rights: Annotated[list[RightName], Field(min_length=1)]
    token_sha256: Sha256 | None = None
    certificate: Printable | None = None

    @model_validator(mode="after")
    def _has_one_identity(self) -> Entry:
        if (self.token_sha256 is None) == (self.certificate is None):
            raise ValueError("give either token_sha256 or certificate")
        return self

    @property
    def caller(self) -> Caller:
        """The caller that the entry describes."""
        rights = reduce(or_, (Right[right.upper()] for right in self.rights))
        return Caller(self.name, tuple(self.namespaces), rights)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    caller: Annotated[list[Entry], Field(min_length=1)]


class Callers:
    """All known callers, found by token or certificate."""

    def __init__(self, entries: Collection[Entry]) -> None:
        self._by_token = [(entry.token_sha256, entry.caller) for entry in entries if entry.token_sha256]
        self._by_certificate = {entry.certificate: entry.caller for entry in entries if entry.certificate}

    def identify(self, token_sha256: str | None, names: Collection[str]) -> Caller:
        """Return the caller with a token of this hash, in constant time, or with a certificate of one of these names.

        A token takes precedence over a certificate, valid or not, and earlier names over later ones. Raises
        UnauthenticatedError.
        """
        found = None
        if token_sha256 is not None:
            for known, caller in self._by_token:
                if hmac.compare_digest(known, token_sha256):
                    found = caller
            reason = "the bearer token is not known"
        else:
            found = next((self._by_certificate[name] for name in names if name in self._by_certificate), None)
            reason = "the certificate names no known caller" if names else NO_TOKEN
        if found is None:
            raise UnauthenticatedError(reason)
        return found


def sha256_of(token: str) -> str:
    """Return the hash of a token, as a callers file contains it."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_callers(path: Path, *, certificates: bool) -> Callers:
    """Read a callers file; certificates: whether clients present certificates.

    Raises UserError, with the key, for a file that cannot be used or that is writable by everybody.
    """
    data = read_file(path, "callers")
    if path.stat().st_mode & stat.S_IWOTH:
        raise UserError(f"callers: {path} is writable by everybody, who could grant rights; run: chmod o-w {path}")
    try:
        return Callers(parse_callers(data.decode(), certificates=certificates))
    except (ValueError, UserError) as problem:
        raise UserError(f"callers: {path}: {problem}") from None


def parse_callers(text: str, *, certificates: bool) -> list[Entry]:
    """Return the entries of a callers file. Raises ValueError, or UserError with the key, without quoting the text."""
    try:
        entries = _File.model_validate(tomllib.loads(text)).caller
    except ValidationError as problem:
        # The message does not quote values: one may be a token that was written in place of its hash.
        first = problem.errors(include_url=False)[0]
        raise UserError(f"{_key_of(first['loc'])}: {first['msg'].removeprefix('Value error, ')}") from None
    for index, entry in enumerate(entries):
        if entry.certificate is not None and not certificates:
            raise UserError(f"caller[{index}].certificate: clients present certificates only if client_ca is set")
    for field in ("token_sha256", "certificate"):
        _check_uniqueness(field, [getattr(entry, field) for entry in entries])
    return entries


def _check_uniqueness(field: str, values: list[str | None]) -> None:
    for value, count in Counter(values).items():
        if value is not None and count > 1:
            last = len(values) - 1 - values[::-1].index(value)
            raise UserError(f"caller[{last}].{field}: already used by caller[{values.index(value)}]")


def _key_of(location: tuple[int | str, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".") or "the file"


# --- Calls

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


AccessControl = Watched[Callers] | None
"""The callers file, reloaded when it changes. Without one everybody who can connect has every right: whoever the
permissions of the Unix socket admit, every user of the machine on loopback, and with `client_ca` every client with a
certificate."""


def access_control(
    config: AccessConfig, *, check_interval_s: float = CHECK_INTERVAL_S, clock: Callable[[], float] = time.monotonic
) -> AccessControl:
    """Read the callers file. Raises UserError if it is unusable; later invalid changes are logged and ignored.

    check_interval_s: as in `Watched`.
    """
    if config.callers is None:
        return None
    read = partial(read_callers, config.callers, certificates=config.client_ca is not None)
    return Watched([config.callers], read, check_interval_s=check_interval_s, clock=clock)


class AuthorizedCall:
    """One call or stream and its caller. Rights are those in the callers file at the time of each check."""

    def __init__(self, context: Context, access: AccessControl) -> None:
        """Identify the caller. Raises UnauthenticatedError, also for malformed credentials."""
        given = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
        scheme, _, token = given[0].partition(" ") if given else ("bearer", "", "")
        if len(given) > 1 or scheme.lower() != "bearer" or bool(given) != bool(token):
            raise UnauthenticatedError("give one authorization of the form: Bearer TOKEN")
        self._token_sha256 = sha256_of(token) if token else None
        peer = context.auth_context()
        self._names = [name.decode(errors="replace") for key in (SAN, COMMON_NAME) for name in peer.get(key, ())]
        """Names in the certificate that TLS has verified: subject alternative names, then the common name."""
        self._access = access
        self._known: Callers | None = None
        self._caller = EVERYBODY
        self._update()

    @property
    def caller(self) -> Caller:
        """The caller. Raises UnauthenticatedError if it has been removed from the callers file."""
        self._update()
        return self._caller

    def require(self, right: Right, namespace: str) -> None:
        """Raise PermissionDeniedError unless the caller has all of `right` in `namespace`, which need not exist.

        Raises UnauthenticatedError as `caller`.
        """
        self.caller.require(right, namespace)

    def _update(self) -> None:
        """Identify the caller if the callers file has changed."""
        if self._access is not None and (known := self._access.current()) is not self._known:
            self._caller, self._known = known.identify(self._token_sha256, self._names), known
