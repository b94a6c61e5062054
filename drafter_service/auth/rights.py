"""What a caller may do in which namespaces, and the refusals.

A check looks at the caller's own rights and the name that it asks for, at nothing else, and comes before anything is
looked up. So neither the text of a refusal nor the time that it takes says anything about a namespace that the caller
has no business in, not even whether it exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from fnmatch import fnmatchcase
from typing import ClassVar

import grpc

LONGEST_NAME_SHOWN = 80


class Right(Flag):
    """A right to a namespace. They are independent: ADMIN alone may not draft."""

    READ = auto()
    """Draft from it, and see its statistics."""
    LEARN = auto()
    """Add text to it."""
    ADMIN = auto()
    """Forget text, drop it, snapshot it, and see passages of it."""


EVERY_RIGHT = Right.READ | Right.LEARN | Right.ADMIN


class AccessDeniedError(Exception):
    """A call is refused; `code` is the gRPC status that it ends with."""

    code: ClassVar[grpc.StatusCode]


class UnauthenticatedError(AccessDeniedError):
    """Nobody knows who calls."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(AccessDeniedError):
    """The caller is known and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


@dataclass(frozen=True)
class Caller:
    """Somebody with the same rights in all namespaces that match one of the patterns."""

    name: str
    namespaces: tuple[str, ...]
    """Shell patterns, such as `team-a-*`; case matters."""
    rights: Right

    def may(self, right: Right, namespace: str) -> bool:
        """Whether it has all of `right` in `namespace`, which need not exist."""
        return right in self.rights and any(fnmatchcase(namespace, pattern) for pattern in self.namespaces)

    def require(self, right: Right, namespace: str) -> None:
        """Raises PermissionDeniedError unless it may."""
        if not self.may(right, namespace):
            shown = ascii(namespace[:LONGEST_NAME_SHOWN])
            wanted = "/".join(str(part.name).lower() for part in right)
            raise PermissionDeniedError(f"caller {self.name!a} has no {wanted} right to namespace {shown}")


EVERYBODY = Caller("everybody", ("*",), EVERY_RIGHT)
"""Where no callers file is given: what protects the address is all the protection there is."""
