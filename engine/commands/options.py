"""Options of the engine that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from engine.config import KvDtype, Verification
from engine.drafters.registry import DEFAULT_ADDRESS, describe_kinds, single_kind
from engine.models.hub import find_model
from engine.models.shipped import SHIPPED_MODEL
from ssd.config import MAX_DRAFT, DraftShape
from ssd.errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "plain", "flashinfer")
SHAPES = ("auto", "path", "tree")
KV_DTYPES = ("auto", "fp8")
VERIFICATIONS = ("exact", "rejection")


@dataclass(frozen=True)
class EngineOptions:
    """Settings from which `engine.commands.launch` builds an engine."""

    model: Path
    """Hugging Face folder."""
    device: str
    """Device name of PyTorch, or `auto`: a GPU if there is one."""
    dtype: str
    """`auto`: float32 on a CPU, bfloat16 on a GPU."""
    attention: str
    """As in `engine.attention.backend.choose_backend`."""
    drafter: str
    """A name of `engine.drafters.registry.KINDS`, or `package.module:Class`."""
    drafter_options: Mapping[str, str]
    """Settings of the drafter, see `engine.drafters.registry.configure`."""
    address: str
    """Address of a sidecar."""
    max_draft: int
    draft_shape: DraftShape | Literal["auto"]
    """`auto`: see `engine.executor.draft_shape`."""
    verification: Verification
    max_sequences: int
    kv_memory: int
    """Memory for the KV cache in MiB."""
    kv_dtype: KvDtype
    prefix_cache: bool
    in_flight: int | None
    """As in `EngineConfig`."""
    threads: int | None

    @classmethod
    def of(cls, model: str | None, **given: Any) -> EngineOptions:
        """Return the options of a command. `model`: folder or hub name; None: the shipped model. Raises UserError."""
        return cls(find_model(model) if model else SHIPPED_MODEL, **given)


def _drafter(_context: click.Context, _option: click.Parameter, text: str) -> str:
    """Check the name of a drafter before anything is loaded. Raises UserError."""
    return single_kind(text)


def _pairs(_context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Split each `KEY=VALUE`. Raises UserError."""
    pairs = {}
    for text in given:
        key, separator, value = text.partition("=")
        if not key or not separator:
            raise UserError(f"{option.opts[0]} must be KEY=VALUE, not {text!r}")
        pairs[key] = value
    return pairs


def engine_options(max_sequences: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options to a command; `max_sequences`: default of that option."""
    options = (
        click.option(
            "--model", help="Hugging Face folder or hub name.  [default: the small model that ships with the package]"
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
            "--drafter",
            callback=_drafter,
            metavar="KIND",
            default="ssd",
            help=f"What proposes tokens. {describe_kinds()}; package.module:Class: a drafter of your own.",
        ),
        click.option(
            "--drafter-option",
            "drafter_options",
            multiple=True,
            metavar="KEY=VALUE",
            callback=_pairs,
            help="Setting of the drafter; may be given again.",
        ),
        click.option("--address", default=DEFAULT_ADDRESS, help="Address of the sidecar, for --drafter ssd-remote."),
        click.option(
            "--max-draft",
            type=click.IntRange(0, MAX_DRAFT),
            default=16,
            help=f"Most draft tokens per request and step; drafters propose at most {MAX_DRAFT}.",
        ),
        click.option(
            "--draft-shape",
            type=click.Choice(SHAPES),
            default="auto",
            help="Shape of drafts: a path has no branches, a tree has. auto: the faster one, from measured step times. "
            "A sidecar drafts in the shape that it was started with.",
        ),
        click.option(
            "--verification",
            type=click.Choice(VERIFICATIONS),
            default="exact",
            help="How drafts are accepted when sampling. exact: outputs equal those without drafts, token by token; "
            "rejection: they have the same distribution, and more drafts are accepted of a drafter that samples.",
        ),
        click.option(
            "--max-sequences",
            type=click.IntRange(min=1),
            default=max_sequences,
            help="Most requests that run at the same time; more wait.",
        ),
        click.option(
            "--kv-memory", type=click.IntRange(min=1), default=256, metavar="MIB", help="Memory for the KV cache."
        ),
        click.option(
            "--kv-dtype",
            type=click.Choice(KV_DTYPES),
            default="auto",
            help="Type of the KV cache; auto: the model's; fp8: twice the tokens, less precise, needs flashinfer.",
        ),
        click.option(
            "--prefix-cache/--no-prefix-cache",
            default=True,
            help="Compute the common beginning of prompts only once.",
        ),
        click.option(
            "--in-flight",
            type=click.IntRange(0, 1),
            hidden=True,
            help="Number of steps in flight while the next one is planned, instead of deciding at run time.",
        ),
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            help="CPU threads, at most 4 per processor.  [default: PyTorch's choice]",
        ),
    )

    def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return with_options
