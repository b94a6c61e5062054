"""Build the executors of an engine: a KV cache, attention over it, and the measured durations of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.attention.backend import choose_backend, make_attention, make_ops
from engine.attention.base import StepShape
from engine.config import EngineConfig
from engine.drafters.base import NO_OUTPUTS, TargetOutputs
from engine.drafters.device_chain import DeviceChain
from engine.drafters.draft_forward import DraftForward
from engine.executor.batch import NO_PARENTS, Batch
from engine.executor.device_state import DeviceState
from engine.executor.eager import EagerExecutor
from engine.executor.fixed_step import FixedStep
from engine.executor.graph import GraphExecutor
from engine.executor.kv_memory import available_memory, default_kv_memory, page_bytes, page_count
from engine.executor.ranks.leader import Cache
from engine.executor.runner import Runner, attention_config, open_runner
from engine.executor.shapes import StepGrid
from engine.executor.transfer import CopyStream
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.lora.pool import AdapterPool
from engine.models.sharding import ShardedDecoder
from engine.scheduling.pages import PagePool
from engine.scheduling.plan import StepPlan
from engine.scheduling.request import SamplingParams
from engine.scheduling.result import StepResult
from engine.scheduling.table import rows_for
from ssd.budget.curve import StepCurve, measured_curve

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Numbers of tokens per step whose durations are measured."""
MAX_LOGIT_ROWS = 512
"""Largest number of rows of logits in a measured step, which limits its memory."""


class Executors(NamedTuple):
    """The executors of one engine, their page pool, and the measured durations of steps."""

    eager: EagerExecutor
    """Runs every step that `graph` does not run."""
    pages: PagePool
    graph: GraphExecutor | None = None
    """Runs all steps, or, if the device makes drafts, those in which no request needs the host."""
    curve: StepCurve | None = None
    """Durations of steps whose drafts the host makes, if they were measured."""
    plain_curve: StepCurve | None = None
    """Durations of steps without drafts on the graph executor, if they were measured and the device makes drafts."""


def build_executors(
    model: Decoder,
    config: EngineConfig,
    attention: str,
    common: SamplingParams,
    notify: Callable[[str], None],
    *,
    measure: bool,
    needs: TargetOutputs = NO_OUTPUTS,
    adapters: AdapterPool | None = None,
    bind: Callable[[DraftForward], DeviceChain | None] = lambda _: None,
) -> Executors:
    """Allocate a KV cache for a loaded model and create its executors.

    There is a graph executor on CUDA devices and where `config.in_flight` is 1, unless the host needs the results of
    every step, there are LoRA `adapters`, or the model is divided over ranks. `attention`: as in `choose_backend`.
    `common` and `notify`: as in `build_engine`. `measure`: time steps for a few seconds.
    `needs`: outputs that the drafter needs. `bind`: gives the drafter access to the KV pages, and returns its drafting
    on the device, None if it drafts on the host. Raises UserError for an attention backend or KV cache dtype that is
    not available.
    """
    config = with_kv_memory(model, config, needs)
    dtype = model.embedding.weight.dtype
    device = str(model.embedding.weight.device)
    backend = choose_backend(attention, model.config, dtype, device)
    pages = PagePool(
        page_count(_page_bytes(model, config, needs), config, model.config.max_positions), config.page_size
    )
    # One page beyond the pool's stores the keys and values of padding.
    runner = open_runner(model, Cache(backend, pages.count + 1, config.page_size), adapters)
    own = tuple(
        make_attention(backend, shape, pages.count + 1, config.page_size, dtype, device, first_slot)
        for shape, first_slot, _ in needs.layers
    )
    draft_forward = DraftForward(own, runner.attention, pages, torch.device(device), make_ops(backend))
    eager = EagerExecutor(runner, config.page_size, needs)
    chain = bind(draft_forward)
    is_cuda = torch.device(device).type == "cuda"
    obstacles = {
        "the drafter needs more of the target than tokens": needs != NO_OUTPUTS and chain is None,
        "drafts are trees": config.draft_shape == "tree",
        "there are LoRA adapters": adapters is not None,
        "the model is divided over several devices": isinstance(model, ShardedDecoder),
    }
    causes = [cause for cause, applies in obstacles.items() if applies]
    wants_graph = is_cuda or config.in_flight == 1
    if causes and wants_graph:
        how = "without CUDA graphs" if is_cuda else "one at a time"
        notify(f"steps run {how}, because {' and '.join(causes)}")
    if causes or not wants_graph:
        curve = _measure(runner, model.config, config, pages) if measure else None
        return Executors(eager, pages, curve=curve)
    graph = build_graph_executor(model.config, config, runner, pages, device, chain)
    if is_cuda:
        graph.grid.capture(notify, graph.grid.kind_of([common], model.config.vocab_size))
    if chain is not None and measure:
        curve = _measure(runner, model.config, config, pages)
        return Executors(eager, pages, graph, curve, graph.grid.measure())
    return Executors(eager, pages, graph, graph.grid.measure() if measure else None)


def with_kv_memory(model: Decoder, config: EngineConfig, needs: TargetOutputs) -> EngineConfig:
    """Return a configuration with a size of the KV cache: as given, or one that fits the model and the machine."""
    if config.kv_memory_mib is not None:
        return config
    device = torch.device(model.embedding.weight.device)
    available = available_memory(device)
    if isinstance(model, ShardedDecoder) and model.group is not None and device.type == "cpu":
        available //= model.group.shard.count  # All ranks share this memory.
    size = _page_bytes(model, config, needs)
    return replace(config, kv_memory_mib=default_kv_memory(size, config, model.config.max_positions, available))


def _page_bytes(model: Decoder, config: EngineConfig, needs: TargetOutputs) -> int:
    dtype = model.embedding.weight.dtype
    shapes = [attention_config(model), *(layers.config for layers in needs.layers)]
    return page_bytes(shapes, config, dtype, sum(layers.state_size for layers in needs.layers) * dtype.itemsize)


def build_graph_executor(
    model: ModelConfig,
    config: EngineConfig,
    runner: Runner,
    pages: PagePool,
    device: str,
    chain: DeviceChain | None = None,
) -> GraphExecutor:
    """Allocate the device state of an engine and create its graph executor without capturing graphs.

    The cache of `runner` has one page more than `pages`, for padding. chain: drafts on the device; None if drafts come
    from the host.
    """
    longest = model.max_positions
    max_pages = pages.pages_for(longest)
    state = DeviceState(rows_for(config.max_sequences), longest, max_pages, pages.count, torch.device(device))
    copies = CopyStream(state.lengths.device)
    max_draft = config.max_draft if chain is None else chain.depth

    def make(sequences: int, rows: int) -> FixedStep:
        shape = StepShape(sequences, rows, 1 + max_draft, max_pages)
        fixed_chain = None if chain is None else chain.fixed(state, shape)
        return FixedStep(runner.fixed(shape), state, shape, pages.page_size, copies, fixed_chain)

    grid = StepGrid(make, state, config.max_sequences, max_draft, drafts=chain is not None)
    return GraphExecutor(grid, runner, pages.page_size, model.vocab_size, max_draft, chain)


def _measure(runner: Runner, model: ModelConfig, config: EngineConfig, pages: PagePool) -> StepCurve:
    """Measure the durations of steps, writing to pages that are not in use yet.

    Tokens differ, because equal ones are all routed to the same experts.
    """
    rng = np.random.default_rng(0)

    def run(tokens: int, sequences: int) -> None:
        # All sequences write to the same pages, because their content does not matter.
        count = tokens * sequences
        positions = np.tile(np.arange(tokens), sequences)
        batch = Batch(
            rng.integers(model.vocab_size, size=count), positions, positions,
            starts=np.arange(0, count + 1, tokens), computed=np.zeros(sequences, np.int64),
            pages=np.tile(np.arange(pages.pages_for(tokens), dtype=np.int32), (sequences, 1)),
            parents=NO_PARENTS, nodes=np.zeros(sequences + 1, np.int64), logit_rows=np.arange(count)[-MAX_LOGIT_ROWS:],
        )  # fmt: skip
        runner.forward(batch).argmax(dim=-1).cpu()  # waits for the device

    largest = min(config.max_sequences * (1 + config.max_draft), pages.count * pages.page_size, model.max_positions)
    sizes = [size for size in SIZES if size < largest]
    return measured_curve(run, [*sizes, largest], config.max_sequences)


class InFlightStep(Protocol):
    """A launched step whose results have not been read."""

    plan: StepPlan

    def result(self) -> StepResult:
        """Wait for the results and return them. Outputs are not cut where they end."""
        ...


class Executor(Protocol):
    """Runs steps on a device, in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Start a step; may return before the device has run it."""
        ...
