"""`ssd-engine`: run targets, compare and train drafters. Each command imports the heavy modules that it needs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, MutableMapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from drafter_service.settings.flags import FlagCommand, takes
from engine.commands.options import (
    CompareFlags,
    DemoFlags,
    EngineFlags,
    GenerateFlags,
    ProfileFlags,
    SamplingFlags,
    ServeEngineFlags,
    ServerConfig,
    TrainFlags,
)
from ssd.corpus.processors import usable_processors
from ssd.errors import UserError, exit_with_message, missing_extra

MODULES = ("torch", "fastapi", "huggingface_hub", "jinja2", "safetensors", "tokenizers", "uvicorn")
"""Modules of the extra `engine`, which all commands need."""
NO_SPINNING = "0"
WINDOW_S = 0.1
"""Time over which the load of the processors is measured: ten ticks of Linux's clock."""
TOLERATED = 0.5
"""Processors' worth of missing capacity at which threads still spin: background load is not contention."""
STAT = Path("/proc/stat")


class _Command(FlagCommand):
    """A command that needs the extra `engine`, except to print its help page."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options. Raises UserError if a package is missing."""
        missing = [module for module in MODULES if find_spec(module) is None]
        if missing and not set(ctx.help_option_names) & set(args):
            raise missing_extra(f"ssd-engine needs {', '.join(missing)}", "engine")
        return super().parse_args(ctx, args)


class _Commands(click.Group):
    """Commands whose errors and interruptions are printed as one line."""

    command_class = _Command
    group_class = type

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the arguments name."""
        with exit_with_message():
            return super().invoke(ctx)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="ssd-drafter")
def cli() -> None:
    """Inference engine with lossless speculative decoding, for models from Hugging Face folders."""
    limit_spinning(os.environ)


@cli.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@takes(GenerateFlags)
@takes(EngineFlags, "flags")
@takes(SamplingFlags, "sampling")
def generate(prompts: tuple[str, ...], options: GenerateFlags, flags: EngineFlags, sampling: SamplingFlags) -> None:
    """Complete prompts from arguments, a file or stdin.

    A single output is printed while it is produced. Ctrl-C ends all outputs and writes what they have so far.
    """
    engine = flags.engine()  # raises errors before modules are imported and kernels compiled

    from ssd.kernels.progress import ENGINE_WORK, ProgressLines, watched_compilation

    with watched_compilation(ProgressLines(partial(click.echo, err=True)), ENGINE_WORK):
        from engine.commands.generate import run_generate
        from engine.scheduling.request import SamplingParams

        run_generate(prompts, options, engine, SamplingParams(**vars(sampling)))


@cli.command()
@takes(ServeEngineFlags, "flags")
@takes(ServerConfig, "config")
def serve(flags: ServeEngineFlags, config: ServerConfig) -> None:
    """Serve a model with OpenAI's API and a status page."""
    import asyncio

    from engine.api import server

    options = flags.engine()
    # The folder of a downloaded model is named after its revision, so the hub name is used instead.
    is_folder = flags.model is None or Path(flags.model).exists()
    name = flags.name or (options.folder.resolve().name if is_folder else str(flags.model))
    asyncio.run(server.serve(options, config, name, click.echo))


@cli.command()
@takes(DemoFlags)
def demo(options: DemoFlags) -> None:
    """Compare one workload without and with drafts of a sidecar."""
    from engine.commands.compare.demo import demonstrate

    if not demonstrate(options):
        sys.exit(1)


@cli.command()
@takes(CompareFlags)
def compare(options: CompareFlags) -> None:
    """Compare drafters and draft depths on the same prompts.

    Ctrl-C ends the comparison and keeps the results so far.
    """
    if options.cost_profile is not None and options.gpu is not None:
        raise UserError("give either --cost-profile or --gpu, not both")
    rows, engine = options.rows_and_engine()

    from engine.commands.compare.compare import run_comparison

    if not run_comparison(options, rows, engine):
        sys.exit(1)


@cli.command()
@takes(ProfileFlags)
def profile(options: ProfileFlags) -> None:
    """Measure durations of steps and of drafting.

    For the predictions of `compare` and of `ssd-drafter advise`.
    """
    rows, engine = options.rows_and_engine()

    from engine.commands.compare.profile import write_profile

    write_profile(engine, rows, options.concurrency, options.out)


@cli.group()
def train() -> None:
    """Train a drafter for a target."""


def _add_head_command(kind: str, help_text: str) -> None:
    @train.command(kind, help=help_text)
    @takes(TrainFlags)
    def command(options: TrainFlags) -> None:
        from rich.console import Console

        from engine.training.command import train_head

        train_head(kind, options, Console())


for _kind, _help in (
    ("draft-model", "Train a smaller copy of a target."),
    ("mtp", "Train a multi-token prediction layer for a target."),
    ("eagle", "Train an EAGLE head for a target."),
    ("eagle3", "Train an EAGLE-3 head for a target."),
    ("medusa", "Train Medusa heads for a target."),
):
    _add_head_command(_kind, _help)


# --- Waiting threads of OpenMP


def limit_spinning(environment: MutableMapping[str, str], read: Callable[[], str] = STAT.read_text) -> None:
    """Let waiting threads sleep at once if other processes need the processors: if OpenMP's threads exceed those that
    are free. Called before PyTorch is first imported.

    GNU OpenMP, which PyTorch's Linux builds contain, lets a waiting thread spin for milliseconds before it sleeps. On
    idle processors this is fastest. If other processes compete for the processors, a spinning thread keeps the thread
    that it waits for from being scheduled. docs/experiments.md has the figures (2026-11-22).

    Values of GOMP_SPINCOUNT and OMP_WAIT_POLICY in `environment` take precedence. `read` returns /proc/stat.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys() or not STAT.exists():
        return
    processors = usable_processors()
    wanted = environment.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdecimal() else len(processors)
    before = _times(read(), processors)
    time.sleep(WINDOW_S)
    idle, total = (after - start for after, start in zip(_times(read(), processors), before, strict=True))
    busy = len(processors) * (1 - idle / total) if total else 0.0
    if threads > 1 and busy + threads > len(processors) + TOLERATED:
        environment["GOMP_SPINCOUNT"] = NO_SPINNING


def _times(stat: str, processors: Collection[int]) -> tuple[int, int]:
    """Return the ticks that some processors spent idle, and all their ticks."""
    names = {f"cpu{number}" for number in processors}
    rows = [list(map(int, row.split()[1:9])) for row in stat.splitlines() if row.partition(" ")[0] in names]
    return sum(row[3] + row[4] for row in rows), sum(map(sum, rows))


def main() -> None:
    """Run the command line."""
    cli()


if __name__ == "__main__":
    main()
