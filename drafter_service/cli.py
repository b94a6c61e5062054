"""`ssd-drafter`: run the drafter as a service. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import sys

import click

from ssd.errors import UserError

SUFFIXES = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}


class TokenCount(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no argument
    """A number of tokens such as 500k or 16M."""

    name = "tokens"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number that `value` says."""
        text = str(value).lower().replace("_", "").replace(",", "")
        scale = SUFFIXES.get(text[-1:], 1)
        try:
            return int(float(text.removesuffix(text[-1:] if scale > 1 else "")) * scale)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no number of tokens; write 16000000, 500k or 16M", param, ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="ssd-drafter")
def cli() -> None:
    """Spacelike speculative decoding: a drafter that remembers every token your service has seen."""


@cli.command()
@click.option(
    "--listen", required=True, metavar="ADDRESS", help="unix:/path/to/socket or host:port; port 0 takes a free one."
)
@click.option(
    "--capacity", type=TokenCount(), default="16M", help="Tokens to remember; the newest overwrite the oldest."
)
@click.option(
    "--policy",
    type=click.Choice(["suffix", "article"]),
    default="suffix",
    help="suffix: calibrated evidence of all matches. article: the plain scheme, as a baseline.",
)
@click.option("--max-draft", type=click.IntRange(1, 64), default=32, help="Most tokens in one draft.")
@click.option("--shape", type=click.Choice(["path", "tree"]), default="path", help="What the engines can verify.")
@click.option(
    "--cost",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.02,
    help="What verifying one more token costs, as a part of a step, for engines that do not say it themselves.",
)
@click.option(
    "--refresh-interval",
    type=click.FloatRange(min=0, min_open=True),
    default=0.005,
    metavar="SECONDS",
    help="How long finished requests wait for others before they become draftable together.",
)
def serve(
    listen: str, capacity: int, policy: str, max_draft: int, shape: str, cost: float, refresh_interval: float
) -> None:
    """Serve drafts to engines until interrupted (SIGINT or SIGTERM)."""
    import asyncio
    import os

    # The library that sorts the corpus would take every core from the engine beside it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from drafter_service.address import Address
    from drafter_service.server import DrafterServer, serve_until_signalled
    from ssd.config import DrafterConfig

    address = Address.parse(listen)
    try:
        config = DrafterConfig(
            capacity=capacity,
            policy=policy,  # type: ignore[arg-type]  # one of the choices above
            max_draft=max_draft,
            shape=shape,  # type: ignore[arg-type]  # one of the choices above
            cost=cost,
            refresh_interval_s=refresh_interval,
        )
        server = DrafterServer(config, address)
    except ValueError as problem:
        raise UserError(str(problem)) from None
    asyncio.run(serve_until_signalled(server, lambda: _announce(server.address.text, capacity)))
    stats = server.stats
    figures = stats.summary()
    click.echo(
        f"stopped: {stats.committed:,} tokens committed, {stats.verified:,} drafted, {stats.accepted:,} accepted, "
        f"{figures['tokens_per_step']:.2f} tokens per step"
    )


@cli.command()
def precompile() -> None:
    """Compile the kernels into a cache, so that nobody waits for a compiler later."""
    import time

    began = time.perf_counter()
    click.echo("compiling the drafter's kernels (about a minute at the first time)...")
    from ssd.drafter import SuffixDrafter

    SuffixDrafter().close()
    click.echo(f"ready after {time.perf_counter() - began:.1f} s")


def _announce(address: str, capacity: int) -> None:
    click.echo(f"drafter listening at {address}, remembering up to {capacity:,} tokens")


def main() -> None:
    """Run the command line; what the user can mend is one line and exit code 2."""
    try:
        cli()
    except UserError as problem:
        click.echo(f"error: {problem}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
