"""`ssd-drafter advise`: what drafting would gain for the traffic in a log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import click
from annotated_types import Interval

from drafter_service.commands.sources import SourceFlags, preview, shown_progress, source_options
from drafter_service.observability.measuring.results import OWNER_ONLY, check_writable, write
from drafter_service.observability.process import own_version
from drafter_service.settings.flags import File as FilePath
from drafter_service.settings.flags import Flag, FlagCommand, takes
from ssd.errors import UserError

if TYPE_CHECKING:
    from drafter_service.commands.advise.advice import Advice
    from drafter_service.commands.advise.reading import LogFacts
    from drafter_service.commands.advise.trials import Outcome, Trial
    from drafter_service.ingest.files import File
    from drafter_service.ingest.reading import Reading
    from ssd.budget.cost_profile import CostProfile
    from ssd.replay import Recording


@dataclass(frozen=True)
class AdviseFlags:
    """How the log is replayed, and what is written."""

    concurrency: Annotated[int | None, Interval(ge=1, le=1024)] = None
    """Requests that run at once.  [default: by the log's start and end times, otherwise 1]"""
    cost_profile: Annotated[Path | None, Flag(kind=click.Path(path_type=Path, exists=True, dir_okay=False))] = None
    """Durations of the target's steps, measured with `ssd-engine profile`."""
    gpu: str | None = None
    """Without --cost-profile: estimate step durations for this GPU.  [default: h100]"""
    model_size: str = "8b"
    """Size of the target for --gpu: 1b, 3b, 8b, 32b or 70b."""
    out: FilePath | None = None
    """Write a page with charts to this file, such as advice.html."""
    config: Annotated[FilePath | None, Flag("--write-config")] = None
    """Write the recommended settings to this file, for `ssd-drafter serve --config`."""


@click.command(cls=FlagCommand)
@source_options
@takes(AdviseFlags)
def advise(given: SourceFlags, more_sources: tuple[str, ...], options: AdviseFlags) -> None:
    """Replay a log, and say whether drafting is worthwhile.

    Nothing leaves this machine. Prints a verdict and a comparison of settings.
    """
    import tempfile

    from ssd.budget.cost_profile import CostProfile
    from ssd.budget.roofline import roofline

    cost_profile, gpu, out, config = options.cost_profile, options.gpu, options.out, options.config
    if cost_profile is not None and gpu is not None:
        raise UserError("give either --cost-profile or --gpu, not both")
    for path in filter(None, (out, config)):
        check_writable(path)
    profile = CostProfile.read(cost_profile) if cost_profile else roofline(gpu or "h100", options.model_size)
    files, reading = given.reading(more_sources, for_replay=True)
    if given.dry_run:
        preview(files, reading, quiet=given.quiet)
        return
    try:
        # A file without a name: its text is gone with the process, however that ends.
        with tempfile.TemporaryFile() as tokens:
            advice, recording, facts = _analyze(files, reading, tokens, profile, options.concurrency, quiet=given.quiet)
    except KeyboardInterrupt:
        raise UserError("interrupted; nothing was written") from None
    _show(advice)
    estimated = {"gpu": gpu or "h100", "model_size": options.model_size}
    toml = _settings_file(advice, {"cost_profile": str(cost_profile.resolve())} if cost_profile else estimated)
    if out is not None:
        write(out, _page(advice, toml, recording, facts, profile), OWNER_ONLY)
    if config is not None:
        write(config, toml)
    for path in filter(None, (out, config)):
        click.echo(f"wrote {path.absolute()}", err=True)


def _analyze(
    files: list[File], reading: Reading, tokens: BinaryIO, profile: CostProfile, concurrency: int | None, *, quiet: bool
) -> tuple[Advice, Recording, LogFacts]:
    from drafter_service.commands.advise.advice import advise as advice_of
    from drafter_service.commands.advise.advice import plan_samples, plan_whole
    from drafter_service.commands.advise.reading import read_requests
    from drafter_service.commands.advise.trials import run_trial, size_of

    with shown_progress(files, reading, quiet=quiet) as (progress, watch):
        recording, facts = read_requests(files, reading, tokens, watch)

        def run(what: str, trials: list[Trial]) -> list[Outcome]:
            task = progress.add_task(what, total=size_of(recording, trials), speed="")
            return [run_trial(recording, profile, each, lambda count: progress.advance(task, count)) for each in trials]

        samples = run("comparing settings", plan_samples(recording, profile, concurrency))
        [whole] = run("replaying the log", [plan_whole(recording, concurrency, samples)])
    return advice_of(recording, facts, profile, samples, whole, concurrency), recording, facts


def _settings_file(advice: Advice, steps: dict[str, str]) -> str:
    import tomli_w

    names = ("capacity", "draft_shape", "max_draft")
    return tomli_w.dumps({"drafting": {name: getattr(advice.settings, name) for name in names}, "steps": steps})


def _page(advice: Advice, toml: str, recording: Recording, facts: LogFacts, profile: CostProfile) -> str:
    from drafter_service.commands.advise.page import render_page

    details = {
        "ssd-drafter": own_version(),
        "log": ", ".join(f"{count:,} {kind}" for kind, count in facts.files.most_common()),
        "requests": f"{len(recording):,}",
        "output tokens": f"{recording.output_tokens:,}",
        "cost profile": profile.label,
    }
    return render_page(advice, toml, details)


def _show(advice: Advice) -> None:
    from rich.console import Console
    from rich.markup import escape

    from drafter_service.commands.advise.page import HEADS, rows_of, sample_of
    from drafter_service.observability.pages.tables import console_table

    console = Console()
    console.print(escape(advice.verdict))
    console.print(f"\nSettings compared on {sample_of(advice)}:")
    console.print(console_table(HEADS, rows_of(advice)))
    for note in advice.notes:
        console.print(f"note: {escape(note)}")
    for owner, share in (("user", advice.other_users), ("session", advice.other_sessions)):
        if share is not None:
            console.print(f"{share:.0%} of the accepted draft tokens came from another {owner}'s text")
    settings = advice.settings
    console.print(f"settings: capacity {settings.capacity:,}, {settings.draft_shape}, max_draft {settings.max_draft}")
    if advice.vllm:
        console.print(
            f"vLLM 0.33 (for 0.32, see docs/hosts/vllm.md): {advice.vllm}",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
