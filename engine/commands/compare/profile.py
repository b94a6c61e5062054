"""`ssd-engine profile`: measure the durations of steps and of drafting, and write them to a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from drafter_service.observability.measuring.results import cpu_name
from engine.commands.compare.results import Condition
from engine.commands.compare.rows import Row, unusable
from engine.commands.compare.trial import Trial, Workload
from engine.commands.launch import load
from engine.commands.options import EngineOptions
from engine.engine import COMMON_SAMPLING
from engine.executor.build import SIZES, build_executors
from engine.models.decoder import Decoder
from engine.models.tokenizer import Tokenizer
from ssd.budget.cost_profile import CostProfile

TOKENS = 24
"""Length of outputs; the time of drafting is the median over their steps."""
PROMPT_TOKENS = 64
"""Length of the random prompts."""


def write_profile(options: EngineOptions, rows: Sequence[Row], concurrency: Sequence[int], out: Path) -> None:
    """Measure a profile and write it. Raises UserError."""
    console = Console(highlight=False)
    usable = []
    for row in rows:
        if reason := unusable(row, options.draft_folders, options.folder):
            console.print(f"{escape(row.name)} is skipped: {escape(reason)}")
        else:
            usable.append(row)
    model = load(options)
    tokenizer = Tokenizer(options.folder)
    drafter_ms: dict[str, dict[int, dict[int, float]]] = {}
    with console.status("measuring steps") as status:
        profile = measure_steps(model, options, concurrency)
        for row in usable:
            status.update(f"measuring {escape(row.name)}")
            for sequences in concurrency:
                drafting_s = measure_drafting(model, tokenizer, options, row, sequences)
                by_depth = drafter_ms.setdefault(row.name, {}).setdefault(row.depth if row.has_depth else 0, {})
                by_depth[sequences] = 1e3 * drafting_s
    replace(profile, drafter_ms=drafter_ms).write(out)
    console.print(f"wrote {out}: {profile.label}", markup=False)


def measure_steps(model: Decoder, options: EngineOptions, concurrency: Sequence[int]) -> CostProfile:
    """Return the durations of steps with up to `max_draft` draft tokens for each of `concurrency` sequences."""
    most = max(concurrency)
    rows = most * (1 + options.max_draft)
    config = replace(options, max_sequences=most).config
    executors = build_executors(model, config, options.attention, COMMON_SAMPLING, lambda _: None, measure=True)
    assert executors.curve is not None
    step_ms = {
        tokens: {
            sequences: round(1e3 * float(executors.curve.seconds(tokens, sequences)), 6)
            for sequences in concurrency
            if sequences <= tokens <= sequences * (1 + options.max_draft)
        }
        for tokens in sorted({*concurrency, rows, *(size for size in SIZES if size < rows)})
    }
    return CostProfile(device_name(model), options.folder.name, {size: row for size, row in step_ms.items() if row})


def measure_drafting(model: Decoder, tokenizer: Tokenizer, options: EngineOptions, row: Row, sequences: int) -> float:
    """Return the median time that drafting adds to a step of some sequences with random prompts, in seconds."""
    room = model.config.max_positions - TOKENS - options.max_draft - 2
    size = (sequences, max(1, min(PROMPT_TOKENS, room)))
    prompts = np.random.default_rng(0).integers(model.config.vocab_size, size=size, dtype=np.uint32)
    trial = Trial(model, tokenizer, options, Workload((), [*prompts], TOKENS), lambda _: None, lambda *_: None)
    return trial.count(row, Condition("exact", 0.0, sequences)).drafting_s


def device_name(model: Decoder) -> str:
    """Return the name of the GPU or of the processor that holds a model."""
    device = model.embedding.weight.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
