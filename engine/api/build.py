"""The engine of a server, made in a process of its own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from engine.options import EngineOptions

if TYPE_CHECKING:
    from engine.core import Engine


def build(options: EngineOptions) -> Engine:
    """Raises UserError for a model or a drafter that cannot be had."""
    # Imported here, since the HTTP process needs no PyTorch.
    from engine.launch import launch, load
    from engine.tokenizer import Tokenizer

    def warn(text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def say(text: str) -> None:
        print(text, flush=True)

    return launch(load(options), Tokenizer(options.model), options, warn, say)
