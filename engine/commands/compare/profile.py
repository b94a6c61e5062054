"""`ssd-engine profile`: measure the durations of steps and of drafting, and write them to a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from drafter_service.observability.measuring.results import cpu_name
from engine.commands.compare.figures import run_group
from engine.commands.compare.rows import Row, unusable
from engine.commands.launch import launch, load
from engine.commands.options import EngineOptions
from engine.config import EngineConfig
from engine.engine import COMMON_SAMPLING, Engine
from engine.executor.build import SIZES, build_executors
from engine.models.decoder import Decoder
from engine.models.tokenizer import Tokenizer
from engine.scheduling.report import StepReport
from engine.scheduling.request import Request, SamplingParams
from ssd.budget.cost_profile import CostProfile

STEPS = 24
"""Number of steps whose median is the time of drafting."""
PROMPT_TOKENS = 64
"""Length of the random prompts."""


def write_profile(options: EngineOptions, rows: Sequence[Row], concurrency: Sequence[int], out: Path) -> None:
    """Measure a profile and write it. Raises UserError."""
    console = Console(highlight=False)
    usable = []
    for row in rows:
        if reason := unusable(row, options.draft_models, options.model):
            console.print(f"{escape(row.name)} is skipped: {escape(reason)}")
        else:
            usable.append(row)
    model = load(options)
    tokenizer = Tokenizer(options.model)
    with console.status("measuring steps") as status:
        profile = measure_steps(model, options, concurrency)

        def announce(name: str) -> None:
            status.update(f"measuring {escape(name)}")

        drafter_ms = measure_drafters(model, tokenizer, options, usable, concurrency, announce)
    replace(profile, drafter_ms=drafter_ms).write(out)
    console.print(f"wrote {out}: {profile.label}", markup=False)


def measure_steps(model: Decoder, options: EngineOptions, concurrency: Sequence[int]) -> CostProfile:
    """Return the durations of steps with up to `max_draft` draft tokens for each of `concurrency` sequences."""
    config = _config(options, max(concurrency))
    executors = build_executors(model, config, options.attention, COMMON_SAMPLING, lambda _: None, measure=True)
    assert executors.curve is not None
    largest = config.max_sequences * (1 + config.max_draft)
    step_ms = {
        tokens: {
            sequences: round(1e3 * float(executors.curve.seconds(tokens, sequences)), 6)
            for sequences in concurrency
            if sequences <= tokens <= sequences * (1 + config.max_draft)
        }
        for tokens in sorted({*concurrency, largest, *(size for size in SIZES if size < largest)})
    }
    return CostProfile(device_name(model), options.model.name, {size: row for size, row in step_ms.items() if row})


def measure_drafters(
    model: Decoder,
    tokenizer: Tokenizer,
    options: EngineOptions,
    rows: Sequence[Row],
    concurrency: Sequence[int],
    announce: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[int, dict[int, float]]]:
    """Return the median time that drafting adds to a step, as `CostProfile.drafter_ms`, with random prompts."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for row in rows:
        announce(row.name)
        for sequences in concurrency:
            own = replace(
                options,
                drafter=row.drafter,
                drafter_options=row.options,
                config=replace(_config(options, sequences), draft_shape=row.shape),
            )
            engine = launch(model, tokenizer, own, warn=announce, notify=lambda _: None, verifies_all=True)
            with closing(engine):
                by_depth = found.setdefault(row.name, {}).setdefault(row.depth if row.has_depth else 0, {})
                by_depth[sequences] = 1e3 * _drafting_s(engine, sequences)
    return found


def _drafting_s(engine: Engine, sequences: int) -> float:
    on_device = engine.device_drafting_s(sequences)
    if on_device is not None:
        return on_device
    rng = np.random.default_rng(0)
    room = engine.model.max_positions - STEPS * (1 + engine.max_draft) - 1
    prompts = rng.integers(engine.model.vocab_size, size=(sequences, max(1, min(PROMPT_TOKENS, room))), dtype=np.uint32)
    sampling = SamplingParams(STEPS * (1 + engine.max_draft), ignore_eos=True)
    seconds: list[float] = []

    def observe(report: StepReport) -> None:
        seconds.append(report.times.draft)

    run_group(engine, [Request(prompt, sampling) for prompt in prompts], STEPS, observe)
    return median(seconds)


def device_name(model: Decoder) -> str:
    """Return the name of the GPU or of the processor that holds a model."""
    device = model.embedding.weight.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def _config(options: EngineOptions, sequences: int) -> EngineConfig:
    rows = sequences * (1 + options.config.max_draft)
    return replace(options.config, max_sequences=sequences, max_step_tokens=max(options.config.max_step_tokens, rows))
