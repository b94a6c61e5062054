"""Settings, amounts of work, the model, the engines and the figures that all parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.shapes import SHAPES, Ceilings, kv_bytes_per_token, random_model
from benchmarks.support.resources import free_bytes
from benchmarks.support.targets import Target
from engine.config import EngineConfig
from engine.engine import Engine, build_engine
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import DTYPES
from engine.models.packed import pack
from ssd.config import DraftShape
from ssd.types import Drafter

MAX_DRAFT = 16
"""Largest number of draft tokens of a sequence in a step, for the engine and the drafters."""
CEILING_TRIES = 20
PROMPT_STEP_TOKENS = 4096
"""Number of prompt tokens in a step, in addition to a draft for every sequence."""


@dataclass(frozen=True)
class Scale:
    """Amounts of work, fixed so that runs are comparable and all parts stay within their time limits."""

    copy_bytes: int
    product: int
    """Number of rows and of columns of the matrices that are multiplied for the compute ceiling."""
    context: int
    """Number of tokens before the steps of one stream."""
    long_context: int
    """Number of tokens before steps that verify trees."""
    steps: int
    """Number of timed steps of one kind in a round."""
    rounds: int
    concurrencies: tuple[int, ...]
    served: tuple[int, ...]
    """Number of the trace's requests in a round, at each concurrency."""
    learned: int
    """Number of earlier requests that the drafter has seen."""
    prompt_tokens: int
    """Largest prompt length; requests with longer ones are left out, so that turns of a session keep their prefix."""
    output_tokens: int
    streams: int
    """Number of streams in a batch for figures without a stated concurrency."""


FULL = Scale(
    copy_bytes=4 << 30,
    product=8192,
    context=2048,
    long_context=32_768,
    steps=100,
    rounds=3,
    concurrencies=(1, 16, 64, 256),
    served=(12, 64, 128, 384),
    learned=400,
    prompt_tokens=5000,
    output_tokens=128,
    streams=64,
)
TINY = Scale(
    copy_bytes=1 << 20,
    product=64,
    context=40,
    long_context=200,
    steps=6,
    rounds=1,
    concurrencies=(1, 2),
    served=(2, 3),
    learned=2,
    prompt_tokens=40,
    output_tokens=20,
    streams=4,
)
SCALES = {"full": FULL, "tiny": TINY}


@dataclass(frozen=True)
class Setting:
    """Settings from the command line."""

    device: str
    dtype: str
    attention: str
    """As in `choose_backend`."""
    shape: str
    """Key of `SHAPES`."""
    scale: str
    """Key of `SCALES`."""
    trace: Path | None
    in_flight: int | None = None
    """As in `EngineConfig`."""


class SkippedError(Exception):
    """Raised if a part cannot run here; the message gives the reason."""


@dataclass(frozen=True)
class Figure:
    """One measured value."""

    name: str
    value: float
    unit: str
    of: int
    """Number of values that it is the median of; 1 for a count or a derived value."""
    target: Target | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """Additional values of the same run; names contain units."""

    def as_row(self) -> dict[str, Any]:
        """Return the figure as a row of a document."""
        value = round(self.value, 5)
        row = {"name": self.name, "value": value} if self.target is None else self.target.row(self.name, value)
        return {**row, "unit": self.unit, "of": self.of, "details": self.details}


class Bench:
    """The model, engines and measured ceilings of a setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.scale = SCALES[setting.scale]
        self.dtype = DTYPES[setting.dtype]
        self.on_gpu = setting.device.startswith("cuda")

    @cached_property
    def model(self) -> Decoder:
        """Packed model with random weights of the shape, with room for the long context."""
        return pack(random_model(self.config, self.dtype, self.setting.device))

    @property
    def config(self) -> ModelConfig:
        """The shape, with a context window that holds the long context."""
        shape = SHAPES[self.setting.shape]
        # No measured time depends on the size of the window.
        return replace(shape, max_positions=max(shape.max_positions, self.scale.long_context + 4096))

    def engine(
        self,
        drafter: Drafter,
        sequences: int,
        context: int,
        *,
        max_draft: int = MAX_DRAFT,
        shape: DraftShape = "path",
        has_budget: bool = False,
    ) -> Engine:
        """Return an engine with the same setup as in production, for `sequences` of up to `context` tokens."""
        return build_engine(
            self.model,
            self.engine_config(sequences, context, max_draft, shape),
            drafter,
            has_budget=has_budget,
            attention=self.setting.attention,
        )

    def engine_config(self, sequences: int, context: int, max_draft: int, shape: DraftShape) -> EngineConfig:
        """Return settings with a KV cache for `sequences`, or as large as memory allows."""
        usual = EngineConfig()
        kv_bytes = kv_bytes_per_token(self.config, self.dtype.itemsize)
        wanted = sequences * (context + max_draft + 2 * usual.page_size) * kv_bytes
        free = free_bytes(self.setting.device)
        return EngineConfig(
            max_sequences=sequences,
            max_step_tokens=sequences * (1 + max_draft) + PROMPT_STEP_TOKENS,
            kv_memory_mib=max(64, -(-min(wanted, free or wanted) >> 20)),
            max_draft=max_draft,
            draft_shape=shape,
            in_flight=0 if shape == "tree" else self.setting.in_flight,
        )

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Return the median time of `run`, after two warm-up runs."""
        seconds = []
        for number in range(times + 2):
            self.wait()
            began = perf_counter()
            run()
            self.wait()
            if number >= 2:
                seconds.append(perf_counter() - began)
        return median(seconds)

    @cached_property
    def ceilings(self) -> Ceilings:
        """Ceilings, measured in the same process and on the same device as the figures that use them.

        A large copy and a large matrix product of random numbers are timed (zeros would be faster).
        """
        device, size = self.setting.device, self.scale.product
        count = self.scale.copy_bytes // 2  # bytes read and bytes written are both counted
        source = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copying = self.seconds(lambda: target.copy_(source), CEILING_TRIES)
        factors = [torch.randn(size, size, dtype=self.dtype, device=device) for _ in range(2)]
        product: Tensor = torch.empty_like(factors[0])
        multiplying = self.seconds(lambda: torch.mm(factors[0], factors[1], out=product), CEILING_TRIES)
        return Ceilings(2 * count / copying, 2 * size**3 / multiplying)
