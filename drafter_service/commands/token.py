"""`ssd-drafter token`: make a bearer token and its entry for the callers file."""

from __future__ import annotations

import json

import click

from ssd.errors import UserError

TOKEN_BYTES = 32


def _split(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    return [part.strip() for part in value.split(",")]


@click.command()
@click.option("--name", required=True, help="Name of the caller, shown in errors.")
@click.option(
    "--namespaces",
    required=True,
    metavar="PATTERN,...",
    callback=_split,
    help="Patterns of namespaces, such as 'team-a-*,shared'.",
)
@click.option(
    "--rights",
    default="read,learn",
    metavar="RIGHT,...",
    callback=_split,
    help="read: draft. learn: add text. admin: forget, drop, snapshot.",
)
def token(name: str, namespaces: list[str], rights: list[str]) -> None:
    """Make a bearer token.

    The token is printed to stdout and not stored anywhere; its entry for the callers file is printed to stderr.
    """
    import secrets

    from drafter_service.auth.callers import parse_callers, sha256_of

    secret = secrets.token_urlsafe(TOKEN_BYTES)
    entry = _entry(name, namespaces, rights, sha256_of(secret))
    try:
        parse_callers(entry, certificates=False)
    except (UserError, ValueError) as problem:
        raise UserError(str(problem).replace("caller[0].", "--", 1)) from None
    click.echo("# Append to the callers file of the service; the token itself is on stdout.", err=True)
    click.echo(entry, err=True)
    click.echo(secret)


def _entry(name: str, namespaces: list[str], rights: list[str], token_sha256: str) -> str:
    # In TOML, strings and lists of strings are written as in JSON.
    fields = {"name": name, "token_sha256": token_sha256, "namespaces": namespaces, "rights": rights}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
    return "\n".join(["[[caller]]", *lines])
