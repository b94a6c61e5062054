"""A step of a fixed shape, in which the device samples and verifies without the host.

On a GPU each shape is a CUDA graph; elsewhere the same operations run one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.attention.base import StepShape
from engine.drafters.device_chain import FixedChain
from engine.executor.device_state import DeviceState, PaddedDrafts, StepInputs
from engine.executor.kernels.dispatch import next_power_of_2
from engine.executor.kernels.inputs import build_inputs
from engine.executor.kernels.sample import replayed, sampled_tokens
from engine.executor.kernels.verify import verify
from engine.executor.runner import FixedForward
from engine.executor.transfer import CopyStream, PendingArray, on_device
from engine.scheduling.kernels import FIRST_DRAFT, ROWS, SLOT
from engine.scheduling.plan import NO_ROWS

MemoryPool = Any
"""Memory that graphs share, as `torch.cuda.graph_pool_handle` returns it."""

WARM_UPS = 2
"""Number of runs before a capture, in which kernels are compiled and libraries allocate."""


class Kind(NamedTuple):
    """How tokens are chosen; each kind has its own graph."""

    samples: bool
    """Whether any sequence samples; otherwise all are greedy."""
    max_ranked: int | None
    """Largest number of logits per row that truncation has to rank, as in `sampled_tokens`; None: no truncation."""
    drafts: bool = False
    """Whether the device drafts for the next step."""
    host_rows: int = 0
    """Number of rows whose logits the host gets; a power of two or 0."""


class HostInputs(NamedTuple):
    """Inputs of a step of up to B sequences from the host. Each sequence runs its last token and a draft."""

    table: np.ndarray
    """int32 [B, FIRST_DRAFT + max_draft]: the data that is copied to the device, see `engine.scheduling.kernels`."""
    contexts: np.ndarray
    """int64 [B]: upper bound of each sequence's number of tokens in the cache, 0 for none."""
    host_rows: np.ndarray = NO_ROWS
    """int64 [at most `Kind.host_rows`]: rows of the step whose logits the host needs."""


class StepOutput(NamedTuple):
    """What a launched step computes."""

    results: PendingArray
    """int32 [B, FIRST_TOKEN + width], see `engine.scheduling.kernels`; with drafts from the device, the draft follows,
    [B, FIRST_TOKEN + width + width - 1] in total."""
    logits: Tensor
    """float32 [Kind.host_rows, V], of `HostInputs.host_rows` and padding; the next step overwrites them."""


class FixedStep:
    """A step of up to B sequences on N rows."""

    def __init__(
        self,
        forward: FixedForward,
        state: DeviceState,
        shape: StepShape,
        page_size: int,
        copies: CopyStream,
        chain: FixedChain | None = None,
    ) -> None:
        """chain: drafts on the device; None if drafts come from the host."""
        self._forward = forward
        self._chain = chain
        self._state = state
        self._shape = shape
        self._page_size = page_size
        self._copies = copies
        self._idle = np.zeros((shape.sequences, FIRST_DRAFT + shape.width - 1), np.int32)
        self._idle[:, SLOT] = state.idle
        self._table = torch.from_numpy(self._idle).to(state.lengths.device, copy=True)
        # Returning the logits of all rows would keep their memory for each graph.
        self._host_rows = torch.zeros(next_power_of_2(shape.rows), dtype=torch.int64, device=self._table.device)
        self._pool: MemoryPool | None = None
        self._graphs: dict[Kind, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def empty_inputs(self) -> HostInputs:
        """Return the inputs of a step without sequences, for the caller to change."""
        # New arrays, because an earlier copy may still be reading the previous one.
        return HostInputs(self._idle.copy(), np.zeros(len(self._idle), np.int64))

    @torch.inference_mode()
    def run(self, inputs: HostInputs, kind: Kind) -> StepOutput:
        """Launch a step. Capture its graph if necessary."""
        if self._table.is_cuda and kind not in self._graphs:
            self.capture(kind, self._pool)
        self._plan(inputs.contexts, inputs.table[:, ROWS], kind)
        self._table.copy_(on_device(inputs.table, self._table.device), non_blocking=True)
        if len(inputs.host_rows):
            self._host_rows[: len(inputs.host_rows)] = on_device(inputs.host_rows, self._table.device)
        if not self._table.is_cuda:
            results, logits = self._step(kind)
        else:
            graph, results, logits = self._graphs[kind]
            graph.replay()
        return StepOutput(self._copies.fetch(results), logits)

    @torch.inference_mode()
    def capture(self, kind: Kind, pool: MemoryPool | None) -> None:
        """Capture the graph of a kind on a CUDA device, with idle slots only."""
        sequences = self._shape.sequences
        longest = self._state.history.shape[1] - 1
        self._plan(np.full(sequences, longest), self._idle[:, ROWS], kind)
        self._table.copy_(on_device(self._idle, self._table.device))
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step(kind)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results, logits = self._step(kind)
        self._graphs[kind] = graph, results, logits
        self._pool = pool

    def _plan(self, contexts: np.ndarray, rows: np.ndarray, kind: Kind) -> None:
        self._forward.plan(contexts, rows)
        if self._chain is not None and kind.drafts:
            self._chain.plan(contexts, rows)

    def _step(self, kind: Kind) -> tuple[Tensor, Tensor]:
        state, table, shape, chain = self._state, self._table, self._shape, self._chain

        def choose(rows: StepInputs, logits: Tensor) -> Tensor:
            return sampled_tokens(state, rows, logits, samples=kind.samples, max_ranked=kind.max_ranked)

        slots = table[:, SLOT].long()
        drafts = self._drafts(slots)
        starts = pad(table[:, ROWS].cumsum(0, dtype=torch.int32), (1, 0))
        inputs = build_inputs(state, slots, drafts, starts, shape.rows, self._page_size)
        tables = state.page_tables[slots]
        if chain is None:
            logits = self._forward(inputs, tables)
        else:
            logits, hidden = self._forward.with_states(inputs, tables, chain.hidden_layers)
        # Applied in every step, so that recorded outputs need no separate graphs.
        chosen = replayed(state, inputs, choose(inputs, logits))
        verified = verify(state, slots, inputs, chosen, shape.width)
        columns = (verified.counts, (inputs.counts - 1).clamp(min=0))
        results = torch.cat((*(column[:, None] for column in columns), verified.tokens), dim=1)
        if chain is None:
            return results, logits[self._host_rows[: kind.host_rows]]
        if kind.drafts:
            chain.draft(slots, inputs, hidden, chosen, verified.counts, choose)
        else:
            chain.keep_states(inputs, hidden)
        return torch.cat((results, drafts.tokens), dim=1), logits[:0]

    def _drafts(self, slots: Tensor) -> PaddedDrafts:
        """Return the drafts of the step."""
        table = self._table
        tokens = table[:, FIRST_DRAFT:] if self._chain is None else self._chain.drafts(slots)
        return PaddedDrafts(tokens, table[:, ROWS] - 1)
