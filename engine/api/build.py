"""The engine of a server, made in a process of its own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from engine.commands.options import EngineOptions

if TYPE_CHECKING:
    from engine.engine import Engine


def build(options: EngineOptions) -> Engine:
    """Raises UserError for a model or a drafter that cannot be had."""
    # Imported here, since the HTTP process needs no PyTorch.
    from engine.commands.launch import launch, load
    from engine.models.tokenizer import Tokenizer

    def warn(text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def say(text: str) -> None:
        print(text, flush=True)

    return launch(load(options), Tokenizer(options.model), options, warn, say)
