"""Which engine to run: options that all commands share, and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from engine.config import DraftShape, KvDtype
from engine.models.hub import find_model
from engine.models.shipped import SHIPPED_MODEL

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "plain", "flashinfer")
DRAFTERS = ("none", "ngram", "ssd", "ssd-remote")
SHAPES = ("path", "tree")
KV_DTYPES = ("auto", "fp8")
DEFAULT_ADDRESS = "unix:/tmp/ssd-drafter.sock"


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made of."""

    model: Path
    """A Hugging Face folder."""
    device: str
    """As PyTorch calls it, or `auto`: a GPU where there is one."""
    dtype: str
    """`auto`: float32 on a CPU, bfloat16 on a GPU."""
    attention: str
    """As in `engine.attention.backend.choose_backend`."""
    drafter: str
    address: str
    """Of a sidecar."""
    max_draft: int
    draft_shape: DraftShape
    max_sequences: int
    kv_memory: int
    """MiB."""
    kv_dtype: KvDtype
    prefix_cache: bool
    in_flight: int | None
    """As in `EngineConfig`."""
    threads: int | None

    @classmethod
    def of(cls, model: str | None, **given: Any) -> EngineOptions:
        """From a command's options; `model`: a folder or a hub's name, None for the shipped one. Raises UserError."""
        return cls(find_model(model) if model else SHIPPED_MODEL, **given)


def engine_options(max_sequences: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options to a command that runs so many sequences unless told otherwise."""
    options = (
        click.option(
            "--model", help="Hugging Face folder or hub name.  [default: the small model that ships with the package]"
        ),
        click.option("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one."),
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            default="auto",
            help="What the model computes in; auto: float32 on a CPU, bfloat16 on a GPU.",
        ),
        click.option(
            "--attention",
            type=click.Choice(ATTENTIONS),
            default="auto",
            help="Whose kernels run it; auto: FlashInfer's on a GPU where they can run.",
        ),
        click.option("--drafter", type=click.Choice(DRAFTERS), default="ssd", help="Who proposes tokens."),
        click.option("--address", default=DEFAULT_ADDRESS, help="Where the sidecar listens, for --drafter ssd-remote."),
        click.option("--max-draft", type=click.IntRange(0, 256), default=16, help="Most draft tokens in a step."),
        click.option(
            "--draft-shape",
            type=click.Choice(SHAPES),
            default="path",
            help="Of drafts: without branches or with them.",
        ),
        click.option(
            "--max-sequences", type=click.IntRange(min=1), default=max_sequences, help="Most requests running at once."
        ),
        click.option(
            "--kv-memory", type=click.IntRange(min=1), default=256, metavar="MIB", help="Memory for the KV cache."
        ),
        click.option(
            "--kv-dtype",
            type=click.Choice(KV_DTYPES),
            default="auto",
            help="Of the KV cache; auto: the model's; fp8: twice as many tokens, rounded; for --attention flashinfer.",
        ),
        click.option(
            "--prefix-cache/--no-prefix-cache",
            default=True,
            help="Compute what prompts have in common at their start once.",
        ),
        click.option(
            "--in-flight",
            type=click.IntRange(0, 1),
            hidden=True,
            help="Launch each step before the results of so many earlier ones are known, instead of deciding at run time.",
        ),
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            help="CPU threads, at most 4 a processor.  [default: PyTorch's choice]",
        ),
    )

    def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return with_options
