"""`ssd-drafter`: run and administer the drafter as a service. Commands import heavy modules when they run."""

from __future__ import annotations

from typing import Any

import click

from drafter_service.commands.admin import drop, forget, health, namespaces, snapshot, token
from drafter_service.commands.advise.command import advise
from drafter_service.commands.conformance.command import conformance
from drafter_service.commands.report import report
from drafter_service.commands.serve import serve
from drafter_service.commands.warm import warm
from ssd.errors import UserError, exit_with_message

KERNELS = (
    "ssd.acceptance",
    "ssd.baselines.classic",
    "ssd.corpus.search",
    "ssd.drafter",
    "ssd.merged_tree",
    "ssd.replay.replaying",
)
"""Modules that import all kernels of the library and the service."""
ENGINE_KERNELS = (
    "engine.attention.plain",
    "engine.executor.batch",
    "engine.sampling.draft_sampler",
    "engine.drafters.draft_pool",
    "engine.drafters.compiled.drafting",
    "engine.drafters.recycle",
    "engine.drafters.tokens",
    "engine.executor.graph",
    "engine.scheduling.scheduler",
    "engine.speculation.selection",
)
"""Modules that import all kernels of the engine. They need PyTorch, so they are only named here."""
SILENT_S = 15.0
"""Seconds between lines with the time: a single function can take long, and so can the engine's kernels."""
COMPILE = (
    "from ssd.kernels.progress import watched_compilation\nwith watched_compilation(lambda _: None):\n    import {}"
)
"""Program that imports modules without reporting that their kernels are compiled."""


class _Commands(click.Group):
    """Commands whose errors and interruptions are printed as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the arguments name."""
        with exit_with_message():
            return super().invoke(ctx)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="ssd-drafter")
def cli() -> None:
    """Spacelike speculative decoding: a drafter that searches the text your service has produced."""


@cli.command()
def precompile() -> None:
    """Compile all kernels in advance.

    Includes the kernels of ssd-engine if PyTorch is installed.
    """
    import subprocess
    import sys
    import threading
    import time
    from importlib import import_module
    from importlib.util import find_spec

    from ssd.kernels.progress import ProgressLines, watched_compilation

    began = time.perf_counter()
    is_done = threading.Event()

    def show_time() -> None:
        while not is_done.wait(SILENT_S):
            click.echo(f"compiling kernels for {time.perf_counter() - began:.0f} s")

    threading.Thread(target=show_time, daemon=True).start()
    engine = None
    if find_spec("torch") is not None:
        # numba compiles one function at a time, so the engine's kernels have a process of their own.
        engine = subprocess.Popen([sys.executable, "-c", COMPILE.format(", ".join(ENGINE_KERNELS))])
    with watched_compilation(ProgressLines(click.echo)):
        for module in KERNELS:
            import_module(module)  # Kernels are compiled when their modules are imported.
    if engine is not None and engine.wait():
        raise UserError("the kernels of ssd-engine cannot be compiled; the reason is printed above")
    is_done.set()
    click.echo(f"ready after {time.perf_counter() - began:.1f} s")


for command in (advise, serve, warm, report, namespaces, forget, snapshot, drop, token, health, conformance):
    cli.add_command(command)


def main() -> None:
    """Run the command line."""
    cli()


if __name__ == "__main__":
    main()
