"""The engine of a server. It is built in a process of its own; the other one imports this module without PyTorch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from engine.api.settings import EngineOptions
from ssd.config import DrafterConfig

if TYPE_CHECKING:
    from engine.core import Engine


def build(options: EngineOptions) -> Engine:
    """Raises UserError for a model or a drafter that cannot be had."""
    import torch

    from engine.build import build_engine
    from engine.config import EngineConfig
    from engine.drafters.build import build_drafter
    from engine.models.loader import DTYPES, load_model
    from engine.models.packed import pack
    from engine.tokenizer import Tokenizer

    if options.threads:
        torch.set_num_threads(options.threads)
    config = EngineConfig(
        max_sequences=options.max_sequences,
        max_draft=options.max_draft,
        draft_shape=options.draft_shape,
        max_step_tokens=max(2048, options.max_sequences * (1 + options.max_draft)),
        kv_memory_mib=options.kv_memory,
        prefix_cache=options.prefix_cache,
    )
    drafter = build_drafter(
        options.drafter,
        DrafterConfig(shape=options.draft_shape, max_draft=max(1, options.max_draft)),
        options.address,
        warn=lambda text: print(f"warning: {text}", file=sys.stderr, flush=True),
        model=options.model,
    )
    model = pack(load_model(options.model, dtype=DTYPES[options.dtype]))
    return build_engine(model, config, drafter, Tokenizer(options.model).decode, has_budget=options.drafter != "none")
