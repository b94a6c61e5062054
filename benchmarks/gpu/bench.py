"""Amounts of work, the model, the engines and the ceilings that all parts of the GPU benchmark share.

Models have random weights, which are as fast as the originals, with meaningless outputs. Lower bounds of the time of
their steps follow from the bytes that a step reads and the operations that it computes; see `docs/gpu.md`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from statistics import median
from time import perf_counter
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.support import Row
from engine.config import EngineConfig
from engine.engine import Engine, build_engine
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import DTYPES, allocate
from engine.models.packed import pack
from engine.models.rope import Rope
from ssd.config import DraftShape
from ssd.types import Drafter

MAX_DRAFT = 16
"""Largest number of draft tokens of a sequence in a step, for the engine and the drafters."""
CEILING_TRIES = 20
PROMPT_STEP_TOKENS = 4096
"""Number of prompt tokens in a step, in addition to a draft for every sequence."""
SPARE = 0.1
"""Fraction of GPU memory that is left for activations, captured graphs and workspaces of libraries."""


class Scale(NamedTuple):
    """Amounts of work, fixed so that runs are comparable and all parts stay within their time limits."""

    copy_bytes: int = 4 << 30
    product: int = 8192
    """Number of rows and of columns of the matrices that are multiplied for the compute ceiling."""
    context: int = 2048
    """Number of tokens before the steps of one stream."""
    long_context: int = 32_768
    """Number of tokens before steps that verify trees."""
    steps: int = 100
    """Number of timed steps of one kind in a round."""
    rounds: int = 3
    concurrencies: tuple[int, ...] = (1, 16, 64, 256)
    served: tuple[int, ...] = (12, 64, 128, 384)
    """Number of the trace's requests in a round, at each concurrency."""
    learned: int = 400
    """Number of earlier requests that the drafter has seen."""
    prompt_tokens: int = 5000
    """Largest prompt length; requests with longer ones are left out, so that turns of a session keep their prefix."""
    output_tokens: int = 128
    streams: int = 64
    """Number of streams in a batch for figures without a stated concurrency."""


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
SCALES = {"full": Scale(), "tiny": TINY}


SHAPES = {
    "llama3-8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=8192,
        rope=Rope(500_000.0),
        tie_embeddings=False,
    ),
    "tiny": ModelConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=2048,
    ),
}
"""Llama 3 8B, and one for tests, with the shipped model's vocabulary."""

DEVIATION = 0.02
"""Standard deviation of the weights; the initialisation of these families."""


def random_model(config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> Decoder:
    """Return a decoder with random weights, sampled on its device with seed 0; weights differ between device types.

    Raises UserError if they do not fit into memory.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    allocate(decoder.to(dtype), device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in decoder.eval().requires_grad_(False).parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)  # these shapes have norms, but no biases
        else:
            parameter.normal_(0.0, DEVIATION, generator=generator)
    return decoder


class Ceilings(NamedTuple):
    """Measured bandwidth and compute rate of a device."""

    bytes_per_s: float
    """Bandwidth of a large copy; bytes read and bytes written both count."""
    flops_per_s: float
    """Operations per second of a large matrix product."""


@cache
def matrix_weights(model: ModelConfig) -> int:
    """Return the number of weights that every token is multiplied with: the layers and the output projection."""
    with torch.device("meta"):
        modules = [*Decoder(model).modules()]
    return sum(module.weight.numel() for module in modules if isinstance(module, nn.Linear))


def step_bytes(model: ModelConfig, context: int, sequences: int, itemsize: int) -> int:
    """Return the bytes that a step of one token of each sequence reads and writes: weights once, keys and values.

    context: number of tokens of each sequence before the step. Hidden states and logits are left out: less than 1 % of
    the bytes for the models measured here.
    """
    kept = model.num_layers * model.cache_size * sequences * (context + 1)
    return (matrix_weights(model) + kept) * itemsize


def step_flops(model: ModelConfig, context: int, sequences: int) -> int:
    """Return the operations of the same step: 2 per weight and token, and 4 per dimension of a head, query and key."""
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * context
    return sequences * (2 * matrix_weights(model) + attention)


class SkippedError(Exception):
    """Raised if a part cannot run here; the message gives the reason."""


def figure(
    name: str,
    value: float,
    unit: str,
    of: int,
    goal: tuple[Literal["at least", "at most"], float] | None = None,
    details: Row | None = None,
) -> Row:
    """Return one measured value.

    of: number of values that it is the median of; 1 for a count or a derived value. goal: its target. details:
    additional values of the same run; names contain units.
    """
    value = round(value, 5)
    row: Row = {"name": name, "value": value}
    if goal is not None:
        sense, limit = goal
        is_met = value >= limit if sense == "at least" else value <= limit
        row |= {"sense": sense, "target": limit, "met": is_met}
    return {**row, "unit": unit, "of": of, "details": details or {}}


class Bench:
    """The model, engines and measured ceilings for the options of the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        """options: see `benchmarks.gpu.__main__.build_parser`."""
        self.options = options
        self.scale = SCALES[options.scale]
        self.dtype = DTYPES[options.dtype]
        self.on_gpu = options.device.startswith("cuda")

    @cached_property
    def model(self) -> Decoder:
        """Packed model with random weights of the shape, with room for the long context."""
        return pack(random_model(self.config, self.dtype, self.options.device))

    @property
    def config(self) -> ModelConfig:
        """The shape, with a context window that holds the long context."""
        shape = SHAPES[self.options.shape]
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
        """Return an engine with the same setup as in production, for `sequences` of up to `context` tokens.

        Its KV cache has room for them, or is as large as memory allows.
        """
        wanted = sequences * (context + max_draft + 2 * EngineConfig.page_size)
        kv_bytes = wanted * self.config.num_layers * self.config.cache_size * self.dtype.itemsize
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            kv_bytes = min(kv_bytes, max(1 << 20, free - int(SPARE * total)))
        config = EngineConfig(
            max_sequences=sequences,
            max_step_tokens=sequences * (1 + max_draft) + PROMPT_STEP_TOKENS,
            kv_memory_mib=max(64, -(-kv_bytes >> 20)),
            max_draft=max_draft,
            draft_shape=shape,
            in_flight=0 if shape == "tree" else self.options.in_flight,
        )
        return build_engine(self.model, config, drafter, has_budget=has_budget, attention=self.options.attention)

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Return the median time of `run`, after two warm-up runs."""
        seconds = []
        for _ in range(times + 2):
            self.wait()
            began = perf_counter()
            run()
            self.wait()
            seconds.append(perf_counter() - began)
        return median(seconds[2:])

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.on_gpu:
            torch.cuda.synchronize()

    @cached_property
    def ceilings(self) -> Ceilings:
        """Ceilings, measured in the same process and on the same device as the figures that use them.

        A large copy and a large matrix product of random numbers are timed (zeros would be faster).
        """
        device, size = self.options.device, self.scale.product
        count = self.scale.copy_bytes // 2  # bytes read and bytes written are both counted
        source = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
        copied = torch.empty_like(source)
        copying = self.seconds(lambda: copied.copy_(source), CEILING_TRIES)
        factors = [torch.randn(size, size, dtype=self.dtype, device=device) for _ in range(2)]
        product: Tensor = torch.empty_like(factors[0])
        multiplying = self.seconds(lambda: torch.mm(factors[0], factors[1], out=product), CEILING_TRIES)
        return Ceilings(2 * count / copying, 2 * size**3 / multiplying)
