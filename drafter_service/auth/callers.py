"""The file that says who may do what.

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
Several entries may share a name: so a token is replaced while the old one still holds. Only hashes of tokens are kept;
they are safe because the tokens are long and random, as `ssd-drafter token` makes them.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
import tomllib
from collections import Counter
from collections.abc import Collection
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from drafter_service.auth.rights import Caller, Right
from drafter_service.auth.watched import read_file
from ssd.errors import UserError

RightName = Literal["read", "learn", "admin"]
Printable = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Entry(BaseModel):
    """One `[[caller]]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Printable
    namespaces: Annotated[list[Printable], Field(min_length=1)]
    rights: Annotated[list[RightName], Field(min_length=1)]
    token_sha256: Sha256 | None = None
    certificate: Printable | None = None

    @property
    def caller(self) -> Caller:
        """Whom it describes."""
        rights = reduce(or_, (Right[right.upper()] for right in self.rights))
        return Caller(self.name, tuple(self.namespaces), rights)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    caller: Annotated[list[Entry], Field(min_length=1)]


class Callers:
    """Everybody who is known, found by what they present."""

    def __init__(self, entries: Collection[Entry]) -> None:
        self._by_token = [(entry.token_sha256, entry.caller) for entry in entries if entry.token_sha256]
        self._by_certificate = {entry.certificate: entry.caller for entry in entries if entry.certificate}

    def with_token(self, token_sha256: str) -> Caller | None:
        """Whose token has this hash. Takes equally long whoever it is, if anybody."""
        found = None
        for known, caller in self._by_token:
            if hmac.compare_digest(known, token_sha256):
                found = caller
        return found

    def with_certificate(self, names: Collection[str]) -> Caller | None:
        """Whose certificate it is; its names in order of precedence."""
        return next((self._by_certificate[name] for name in names if name in self._by_certificate), None)


def sha256_of(token: str) -> str:
    """What a callers file keeps of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_callers(path: Path, *, certificates: bool) -> Callers:
    """The callers in a file; `certificates` says whether callers present any.

    Raises UserError, with the key, for a file that cannot be used or that everybody may write to.
    """
    data = read_file(path, "callers")
    if path.stat().st_mode & stat.S_IWOTH:
        raise UserError(f"callers: everybody may write to {path} and so give rights; run: chmod o-w {path}")
    try:
        return Callers(parse_callers(data.decode(), certificates=certificates))
    except (ValueError, UserError) as problem:
        raise UserError(f"callers: {path}: {problem}") from None


def parse_callers(text: str, *, certificates: bool) -> list[Entry]:
    """The entries of a callers file. Raises ValueError, or UserError with the key; neither quotes the text."""
    try:
        entries = _File.model_validate(tomllib.loads(text)).caller
    except ValidationError as problem:
        # Messages without the values: a token may stand where its hash should.
        first = problem.errors(include_url=False)[0]
        raise UserError(f"{_key_of(first['loc'])}: {first['msg']}") from None
    for index, entry in enumerate(entries):
        _check_identity(f"caller[{index}]", entry, certificates=certificates)
    for field in ("token_sha256", "certificate"):
        _check_uniqueness(field, [getattr(entry, field) for entry in entries])
    return entries


def _check_identity(key: str, entry: Entry, *, certificates: bool) -> None:
    if (entry.token_sha256 is None) == (entry.certificate is None):
        raise UserError(f"{key}: give either token_sha256 or certificate")
    if entry.certificate is not None and not certificates:
        raise UserError(f"{key}.certificate: no client presents a certificate unless client_ca is set")


def _check_uniqueness(field: str, values: list[str | None]) -> None:
    for value, count in Counter(values).items():
        if value is not None and count > 1:
            last = len(values) - 1 - values[::-1].index(value)
            raise UserError(f"caller[{last}].{field}: caller[{values.index(value)}] has the same; who would it be?")


def _key_of(location: tuple[int | str, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".") or "the file"
