"""Commands for a running service: health, namespaces, forget, snapshot, drop; and `token`, for its callers."""

from __future__ import annotations

import json

import click

from drafter_service.commands.link import Link, connection_options
from drafter_service.settings.flags import FlagCommand
from ssd.errors import UserError

HEALTH_TIMEOUT_S = 3.0
HEALTH_INTERVAL_S = 0.2
"""Interval between checks of a service that is not ready yet."""
SECONDS, WAIT = click.FloatRange(0), click.FloatRange(0, 86400)
SECONDS.name = WAIT.name = "number of seconds"  # In "'1h' is not a valid ..."
RECONNECT_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
"""Connect again quickly while the service is starting."""
TABLE_WIDTH = 1000
"""Width of the list of namespaces in characters: names are not cut in narrow terminals, because other commands need
them."""


@click.command(cls=FlagCommand)
@click.option("--wait", type=WAIT, default=0.0, metavar="SECONDS", help="Wait for a starting service.")
@connection_options
def health(wait: float, link: Link) -> None:
    """Exit with 0 if the service is serving.

    For liveness and startup probes.
    """
    import time

    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from drafter_service.transport.address import NOT_READY, STATE

    until = time.monotonic() + wait
    connector = link.connector()
    with connector.open(RECONNECT_OPTIONS) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check.with_call
        while True:
            left = until - time.monotonic()
            try:
                answer, call = check(
                    health_pb2.HealthCheckRequest(),
                    timeout=max(HEALTH_TIMEOUT_S, left),
                    metadata=connector.metadata(),
                    wait_for_ready=wait > 0,
                )
            except grpc.RpcError as error:
                raise UserError(link.describe(error)) from None
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
            if left <= 0:
                state = dict(call.trailing_metadata() or ()).get(STATE, "it may be starting or shutting down")
                raise UserError(f"the drafter at {link.address} is {NOT_READY}{state}")
            time.sleep(HEALTH_INTERVAL_S)
    click.echo("serving")


@click.command(cls=FlagCommand)
@connection_options
def namespaces(link: Link) -> None:
    """List the namespaces, including those on disk."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from drafter_service.observability.pages.units import printable
    from drafter_service.stubs import drafter_pb2 as pb

    with link.stub() as (stub, metadata):
        found = stub.ListNamespaces(pb.ListNamespacesRequest(), metadata=metadata).namespaces
    table = Table("namespace", "model", "", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("tokens", "capacity", "memory", "streams", "idle", "set aside"):
        table.add_column(name, justify="right")
    for row in found:
        sizes = (f"{row.tokens:,}" if row.tokens or row.is_loaded else "", f"{row.capacity:,}")
        use = (f"{row.memory_bytes / 1e6:,.0f} MB", f"{row.streams}") if row.is_loaded else ("", "")
        idle = f"{row.idle_s:,.0f} s" if row.is_loaded else "on disk"
        model = Text(printable(row.model.name))  # Clients choose this name.
        set_aside = f"{len(row.set_aside_files)} damaged" if row.set_aside_files else ""
        table.add_row(row.name, model, "default" if row.is_default else "", *sizes, *use, idle, set_aside)
    Console(width=TABLE_WIDTH).print(table if found else "there is no namespace that you may read")


@click.command(cls=FlagCommand)
@click.argument("namespace")
@click.option("--request", help="Forget what was learned under this name.")
@click.option("--older-than", type=SECONDS, metavar="SECONDS", help="Forget text that is older than this.")
@click.option("--everything", is_flag=True, help="Forget all text; learned probabilities and statistics are kept.")
@connection_options
def forget(namespace: str, request: str | None, older_than: float | None, everything: bool, link: Link) -> None:
    """Remove text from a namespace and from its snapshot.

    Text of `warm` has the name of its request_id, or the id of an API's response, with #DIGEST after it if another text
    before it in the logs has the same id. Other text, such as rows of CSV and chats of ShareGPT, has a digest of its
    content as its name, also if its id has at most four letters and digits, as counters have: `warm --dry-run` shows
    the name of the first record of each format. A record's further texts, and texts that are equal, have the names
    NAME/1, NAME/2 and so on.

    Exits with 1 if no text has the name given by --request.
    """
    from drafter_service.stubs import drafter_pb2 as pb

    if (request is not None) + (older_than is not None) + everything != 1:
        raise UserError("give one of --request, --older-than and --everything")
    message = pb.ForgetRequest(namespace=namespace)
    if request is not None:
        message.request_id = request
    elif older_than is not None:
        message.older_than_s = older_than
    else:
        message.everything = True
    with link.stub() as (stub, metadata):
        answer = stub.Forget(message, metadata=metadata)
    others = "; other sidecars forget it when they read the shared log" if answer.is_shared else ""
    saved = ", and the snapshot saved again" if answer.snapshot_saved else ""
    if answer.set_aside_files:
        click.echo(
            f"damaged files that were set aside may still contain the text: {', '.join(answer.set_aside_files)}; "
            f"to delete them: ssd-drafter drop {namespace} --set-aside"
        )
    if answer.texts or not answer.HasField("texts"):  # Services up to 0.2.0 do not count.
        count = f": {answer.texts:,} text{'s' * (answer.texts != 1)}" if answer.texts else ""
        click.echo(f"forgotten{count}{saved}{others}")
    elif request is None:
        click.echo(f"nothing to forget{others}")
    else:
        click.echo(f"namespace {namespace} has no text with the name {request!r}{others}", err=True)
        raise click.exceptions.Exit(1)


@click.command(cls=FlagCommand)
@click.option("--namespace", default="", help="Save this namespace only.", show_default=False)
@connection_options
def snapshot(namespace: str, link: Link) -> None:
    """Save the namespaces to the service's snapshot folder now."""
    from drafter_service.stubs import drafter_pb2 as pb

    with link.stub() as (stub, metadata):
        saved = stub.Snapshot(pb.SnapshotRequest(namespace=namespace), metadata=metadata).saved
    for each in saved:
        click.echo(f"{each.namespace}: {each.bytes / 1e6:,.1f} MB in {each.seconds:.2f} s")
    if not saved:
        which = f"{namespace} is not" if namespace else "no namespace that you may administer is"
        click.echo(f"nothing to save: {which} in memory")


@click.command(cls=FlagCommand)
@click.argument("namespace")
@click.option("--set-aside", is_flag=True, help="Delete only its damaged files that were set aside.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@connection_options
def drop(namespace: str, set_aside: bool, yes: bool, link: Link) -> None:
    """Delete a namespace and its snapshot.

    Also deletes its learned probabilities, its statistics, and its damaged files that were set aside.
    """
    files = f"the damaged files of {namespace} that were set aside"
    if not yes:
        what = files if set_aside else f"the namespace {namespace}, all that it has learned, its snapshot, and {files}"
        click.confirm(f"Delete {what}?", abort=True)
    from drafter_service.stubs import drafter_pb2 as pb

    request = pb.DropNamespaceRequest(namespace=namespace, set_aside_only=set_aside)
    with link.stub() as (stub, metadata):
        deleted = stub.DropNamespace(request, metadata=metadata).set_aside_files
    click.echo(f"deleted {', '.join(deleted) or 'nothing'}" if set_aside else f"dropped {namespace}")


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
