"""From a model folder and settings to an engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.attention.backend import choose_backend, choose_kv_dtype, make_attention, make_ops
from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor.batch import Batch, Span
from engine.executor.eager import Runner
from engine.executor.pipeline import PipelinedEngine, build_grid
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.detokenize import Decode
from engine.scheduling.pages import PagePool
from engine.scheduling.request import SamplingParams
from engine.speculation.shape_cost import GridCost
from engine.speculation.token_budget import Budget, StepCost
from ssd.errors import UserError
from ssd.types import Drafter

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of steps that are measured."""
USUAL = SamplingParams(temperature=1.0)
MOST_LOGITS = 512
"""Rows of logits in a step that is measured: of large vocabularies more would not fit into memory."""


def build_engine(
    model: Decoder,
    config: EngineConfig,
    drafter: Drafter,
    decode: Decode | None = None,
    *,
    has_budget: bool = False,
    attention: str = "auto",
    usual: SamplingParams = USUAL,
    say: Callable[[str], None] = lambda _: None,
) -> Engine:
    """An engine for a loaded model. Engines may share a model; each has its own KV cache.

    `decode` is the tokenizer's, for requests with stop strings. `has_budget`: measure what a step costs, for a few
    seconds, and verify only what pays; otherwise everything that was drafted. `attention`: as in `choose_backend`.
    `usual`: what most requests will ask for. `say` is told what takes long. Raises UserError for an attention or a KV
    cache that cannot be had.
    """
    dtype = model.embedding.weight.dtype
    device = str(model.embedding.weight.device)
    backend = choose_backend(attention, model.config, dtype, device)
    kv_dtype = choose_kv_dtype(config.kv_dtype, backend, dtype)
    pages = PagePool(_page_count(model.config, config, kv_dtype), config.page_size)
    # Behind the pages that are handed out one stays nobody's, for padding.
    cache = make_attention(backend, model.config, pages.count + 1, config.page_size, dtype, device, kv_dtype)
    runner = Runner(model, cache, device, make_ops(backend))
    if config.loop == "pipelined":
        grid = build_grid(model.config, config, runner, pages, device)
        if torch.device(device).type == "cuda":
            grid.capture(say, grid.kind_of([usual], model.config.vocab_size))
        budget = Budget(GridCost.measured(grid)) if has_budget and config.max_draft else None
        return PipelinedEngine(model.config, config, runner, pages, drafter, grid, decode, budget)
    budget = Budget(_measure(runner, model.config, config, pages)) if has_budget and config.max_draft else None
    return Engine(model.config, config, runner, pages, drafter, decode, budget)


def _measure(runner: Runner, model: ModelConfig, config: EngineConfig, pages: PagePool) -> StepCost:
    """What steps cost, on pages that hold nothing yet."""

    def run(tokens: int, sequences: int) -> None:
        # All of them write to the same pages: what they hold does not matter.
        table = list(range(pages.pages_for(tokens)))
        spans = [Span(index * tokens, tokens, 0, table) for index in range(sequences)]
        positions = np.tile(np.arange(tokens), sequences)
        rows = np.arange(tokens * sequences)[-MOST_LOGITS:]
        offsets = np.arange(0, tokens * sequences + 1, tokens)
        runner.forward(
            Batch(
                tokens=np.zeros(tokens * sequences, np.int64),
                positions=positions,
                slots=positions,
                spans=spans,
                logit_rows=rows,
                logit_offsets=offsets,
                scored_offsets=np.full(sequences + 1, len(rows)),
            )
        ).argmax(dim=-1).cpu()  # a GPU would still be at it

    most = min(config.max_sequences * (1 + config.max_draft), pages.count * pages.page_size, model.max_positions)
    sizes = [size for size in SIZES if size < most]
    return StepCost.measured(run, [*sizes, most], config.max_sequences)


def _page_count(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Pages for the memory that was granted, or for as many full context windows as can run at once; dtype: of the
    cache. Raises UserError if it holds none.
    """
    page_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize * config.page_size
    granted = (config.kv_memory_mib << 20) // page_bytes
    if granted == 0:
        least = -(-page_bytes >> 20)
        raise UserError(
            f"--kv-memory {config.kv_memory_mib}: a page of this model's KV cache takes {least} MiB; give more"
        )
    usable = config.max_sequences * -(-model.max_positions // config.page_size)
    return min(granted, usable)
