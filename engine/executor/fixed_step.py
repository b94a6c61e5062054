"""A step of a fixed shape, in which the device selects drafts, chooses tokens, and verifies, without the host.

On a GPU each shape is a CUDA graph, captured before it is needed; elsewhere the same operations run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.attention.base import StepShape
from engine.executor.device_state import DeviceState
from engine.executor.kernels.inputs import build_inputs
from engine.executor.kernels.sample import replayed, sampled_tokens
from engine.executor.kernels.select import OutcomeTensors, select_drafts
from engine.executor.kernels.tensors import Drafts, StepInputs
from engine.executor.kernels.verify import verify
from engine.executor.transfer import CopyStream, PendingArray, on_device

MemoryPool = Any
"""Memory that graphs share, as `torch.cuda.graph_pool_handle` returns it."""

WARM_UPS = 2
"""Runs before a capture, in which kernels are compiled and libraries allocate."""
OUTCOMES = 4
"""Largest number of outcomes of the step before for which a sequence may have a draft."""
SEQUENCE_COLUMNS = 2
"""Input columns of a sequence before its outcomes: request slot, rows."""
OUTCOME_COLUMNS = 3
"""Input columns of an outcome before its draft: length of the text, its last token, size of the draft."""
RESULT_COLUMNS = 2
"""Result columns of a sequence before its tokens: number of tokens, number of draft tokens verified."""


class Kind(NamedTuple):
    """How tokens are chosen; each kind has a graph of its own."""

    samples: bool
    """Whether any sequence samples; otherwise all are greedy."""
    max_ranked: int | None
    """Largest number of logits per row that truncation has to rank, as in `sampled_tokens`; None: nothing truncates."""


class Forward(Protocol):
    """A model's forward pass of one shape, see `engine.executor.runner.FixedForward`."""

    def plan(self, contexts: SequenceOf[int], rows: SequenceOf[int]) -> None:
        """Prepare a step from what the host knows of it."""
        ...

    def __call__(self, inputs: StepInputs, page_tables: Tensor) -> Tensor:
        """Return logits of all rows, float32 [N, V]."""
        ...


class StepOrder(NamedTuple):
    """What the host sends for a step of B sequences, each of which runs its last token and a draft."""

    outcomes: np.ndarray
    """int32 [B, SEQUENCE_COLUMNS + OUTCOMES * (OUTCOME_COLUMNS + max_draft)]."""
    contexts: list[int]
    """Largest number of tokens before those that run."""

    @property
    def rows(self) -> list[int]:
        """Number of rows of each sequence: its last token and the longest draft."""
        return self.outcomes[:, 1].tolist()


class FixedStep:
    """A step of up to B sequences on N rows."""

    def __init__(
        self, forward: Forward, state: DeviceState, shape: StepShape, page_size: int, copies: CopyStream
    ) -> None:
        self._forward = forward
        self._state = state
        self._shape = shape
        self._page_size = page_size
        self._copies = copies
        # One tensor, so that one copy transfers it.
        self._idle = np.zeros((shape.sequences, order_columns(shape.width - 1)), np.int32)
        self._idle[:, 0] = state.idle
        self._order = torch.from_numpy(self._idle).to(state.lengths.device, copy=True)
        self._pool: MemoryPool | None = None
        self._graphs: dict[Kind, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.inference_mode()
    def run(self, order: StepOrder, kind: Kind) -> PendingArray:
        """Launch a step and return its results, int32 [B, RESULT_COLUMNS + width], on their way to the host.

        Captures the graph of a kind that has none yet.
        """
        if self._order.is_cuda and kind not in self._graphs:
            self.capture(kind, self._pool)
        padding = [0] * (len(self._idle) - len(order.contexts))
        self._forward.plan([*order.contexts, *padding], [*order.rows, *padding])
        # A new array, because an earlier copy may still be reading the last one.
        rows = self._idle.copy()
        rows[: len(order.outcomes)] = order.outcomes
        self._order.copy_(on_device(rows, self._order.device), non_blocking=True)
        if not self._order.is_cuda:
            return self._copies.fetch(self._step(kind))
        graph, result = self._graphs[kind]
        graph.replay()
        return self._copies.fetch(result)

    @torch.inference_mode()
    def capture(self, kind: Kind, pool: MemoryPool | None) -> None:
        """Capture the graph of a kind on a CUDA device, without sequences."""
        sequences = self._shape.sequences
        longest = self._state.history.shape[1] - 1
        self._forward.plan([longest] * sequences, [0] * sequences)
        self._order.copy_(on_device(self._idle, self._order.device))
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step(kind)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = self._step(kind)
        self._graphs[kind] = graph, result
        self._pool = pool

    def _step(self, kind: Kind) -> Tensor:
        state, order, shape = self._state, self._order, self._shape
        slots = order[:, 0].long()
        drafts = self._drafts(slots)
        # Rows of padding are behind those of all sequences.
        starts = pad(order[:, 1].cumsum(0, dtype=torch.int32), (1, 0))
        inputs = build_inputs(state, slots, drafts, starts, shape.rows, self._page_size)
        logits = self._forward(inputs, state.page_tables[slots])
        chosen = sampled_tokens(state, inputs, logits, samples=kind.samples, max_ranked=kind.max_ranked)
        # Also where nothing was recorded, so that no shape is captured twice.
        chosen = replayed(state, inputs, chosen)
        verified = verify(state, slots, inputs, chosen, shape.width)
        columns = (verified.counts, (inputs.counts - 1).clamp(min=0))
        return torch.cat((*(column[:, None] for column in columns), verified.tokens), dim=1)

    def _drafts(self, slots: Tensor) -> Drafts:
        """Return the drafts for the outcomes of the step before, of no more tokens than there are rows for."""
        order, width = self._order, self._shape.width - 1
        if self._shape.rows == self._shape.sequences:
            none = torch.zeros_like(order[:, 0])
            return Drafts(none[:, None].expand(-1, width), none)
        outcomes = order[:, SEQUENCE_COLUMNS:].view(len(order), OUTCOMES, OUTCOME_COLUMNS + width)
        lengths, last_tokens, sizes = (outcomes[:, :, column] for column in range(OUTCOME_COLUMNS))
        table = OutcomeTensors(lengths, last_tokens, sizes, outcomes[:, :, OUTCOME_COLUMNS:])
        return select_drafts(self._state, slots, table, width)


def order_columns(max_draft: int) -> int:
    """Return the number of columns of `StepOrder.outcomes`."""
    return SEQUENCE_COLUMNS + OUTCOMES * (OUTCOME_COLUMNS + max_draft)
