"""Steps of fixed shapes: all that happens between a step's drafts and its tokens, on the device, as one CUDA graph.

Each shape has a graph, captured before it is needed; on other devices the same work runs from the same buffers, one
operation after another. Nothing in it waits for the host, and the host need not know how the step before went.
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
from engine.executor.kernels.follow import followed
from engine.executor.kernels.inputs import build_inputs
from engine.executor.kernels.lookup import completed
from engine.executor.kernels.sample import replayed, sampled_tokens
from engine.executor.kernels.tensors import Drafts, Prepared, StepInputs
from engine.executor.kernels.verify import verify
from engine.executor.transfer import Arriving, CopyStream, on_device

Pool = Any
"""Of memory that graphs share, as `torch.cuda.graph_pool_handle` gives it."""

WARM_UPS = 2
"""Runs before a capture, in which kernels are compiled and libraries allocate."""
GIVEN = 5
"""Columns of what the host sends for a sequence before the tokens of its path."""
COUNTS = 3
"""Columns of a result before its tokens."""


class Kind(NamedTuple):
    """How much work it is to draw tokens, see `sampled_tokens`."""

    draws: bool
    most: int | None


class Forward(Protocol):
    """A model's forward of one shape, see `engine.executor.eager.FixedForward`."""

    def plan(self, contexts: SequenceOf[int], rows: SequenceOf[int]) -> None:
        """What the host knows before a step."""
        ...

    def __call__(self, inputs: StepInputs, page_tables: Tensor) -> Tensor:
        """Logits of all rows, float32 [N, V]."""
        ...


class Orders(NamedTuple):
    """What the host asks of B sequences. All run their last token; drafts are picked as in `followed`."""

    seats: list[int]
    paths: list[np.ndarray]
    """Tokens prepared, uint32 [n] each."""
    lengths: list[int]
    """Of the texts that they follow."""
    most: list[int]
    """Tokens of each to verify at most."""
    spare: list[int]
    """Tokens to verify at most that are looked up, see `completed`, where nothing prepared is left."""
    contexts: list[int]
    """Tokens before the one that runs, at most."""

    @property
    def rows(self) -> list[int]:
        """Of each: its last token and whatever may be verified."""
        return [1 + max(both) for both in zip(self.most, self.spare, strict=True)]

    @classmethod
    def nobody(cls) -> Orders:
        """Of no sequence."""
        return cls([], [], [], [], [], [])


class FixedStep:
    """Up to B sequences, each with its last token and a draft, on N rows."""

    def __init__(
        self,
        forward: Forward,
        state: DeviceState,
        shape: StepShape,
        furthest: int,
        page_size: int,
        copies: CopyStream,
    ) -> None:
        """furthest: tokens of a prepared path at most, those that the step before may commit among them. copies: on
        which results come back.
        """
        self._forward = forward
        self._state = state
        self._shape = shape
        self._page_size = page_size
        self._copies = copies
        # One tensor, so that one copy brings it: seat, size, length, most, spare, then the path's tokens.
        self._idle = np.zeros((shape.sequences, GIVEN + max(1, furthest)), np.int32)
        self._idle[:, 0] = state.idle
        self._given = torch.from_numpy(self._idle).to(state.lengths.device, copy=True)
        self._pool: Pool | None = None
        self._graphs: dict[Kind, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.inference_mode()
    def run(self, orders: Orders, kind: Kind) -> Arriving:
        """Counts and tokens, see `Result.of_rows`. A kind that was not captured is captured now."""
        if self._given.is_cuda and kind not in self._graphs:
            self.capture(kind, self._pool)
        padding = len(self._idle) - len(orders.seats)
        self._forward.plan([*orders.contexts, *[0] * padding], [*orders.rows, *[0] * padding])
        self._given.copy_(on_device(self._rows(orders), self._given.device), non_blocking=True)
        if not self._given.is_cuda:
            return self._copies.bring(self._step(kind))
        graph, result = self._graphs[kind]
        graph.replay()
        return self._copies.bring(result)

    @torch.inference_mode()
    def capture(self, kind: Kind, pool: Pool | None) -> None:
        """Record the graph, on a CUDA device, with nobody in it. pool: of memory that graphs share."""
        sequences = self._shape.sequences
        longest = self._state.history.shape[1] - 1
        self._forward.plan([longest] * sequences, [0] * sequences)
        self._given.copy_(on_device(self._idle, self._given.device))
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._step(kind)
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = self._step(kind)
        self._graphs[kind] = graph, result
        self._pool = pool

    def _rows(self, orders: Orders) -> np.ndarray:
        """int32, like `_idle`; a fresh array, which a copy may still be reading."""
        rows = self._idle.copy()
        for row, seat, path, length, most, spare in zip(
            rows, orders.seats, orders.paths, orders.lengths, orders.most, orders.spare, strict=False
        ):
            size = min(len(path), len(row) - GIVEN)
            row[:GIVEN] = seat, size, length, most, spare
            row[GIVEN : GIVEN + size] = path[:size]
        return rows

    def _step(self, kind: Kind) -> Tensor:
        """int32 [B, COUNTS + W + W - 1], see `Result`."""
        state, given, shape = self._state, self._given, self._shape
        seats = given[:, 0].long()
        drafts, is_found = self._drafts(seats)
        # Nobody has no rows; those that are left over are behind all.
        own = torch.where(seats == state.idle, 0, 1 + torch.maximum(given[:, 3], given[:, 4]))
        starts = pad(own.cumsum(0, dtype=torch.int32), (1, 0))
        inputs = build_inputs(state, seats, torch.ones_like(own), drafts, starts, shape.rows, self._page_size)
        logits = self._forward(inputs, state.page_tables[seats])
        chosen = sampled_tokens(state, inputs, logits, draws=kind.draws, most=kind.most)
        # Whether anything was recorded or not, so that no shape is captured twice.
        chosen = replayed(state, inputs, chosen)
        verified = verify(state, inputs.verify_rows, chosen, shape.width)
        columns = (verified.counts, inputs.lengths - inputs.verify_rows.scheduled, is_found)
        return torch.cat((*(column[:, None] for column in columns), verified.tokens, drafts.tokens), dim=1)

    def _drafts(self, seats: Tensor) -> tuple[Drafts, Tensor]:
        """What is left of the prepared ones, or else was looked up; and whether it was, int32 [B]."""
        given, width = self._given, self._shape.width - 1
        if self._shape.rows == self._shape.sequences:
            none = torch.zeros_like(given[:, 0])
            return Drafts(none[:, None].expand(-1, width), none), none
        prepared = Prepared(given[:, GIVEN:], given[:, 1], given[:, 2], given[:, 3])
        drafts = followed(self._state, seats, prepared, width)
        return completed(self._state, seats, drafts, given[:, 4])


class Result(NamedTuple):
    """What came of one sequence."""

    draft: np.ndarray
    """uint32: draft tokens that were verified; padding is none."""
    is_found: bool
    """Whether that was looked up, not prepared."""
    tokens: np.ndarray
    """uint32: accepted draft tokens and the target's own."""

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> list[Result]:
        """From what `FixedStep.run` gave."""
        draft = (rows.shape[1] + COUNTS + 1) // 2
        tokens = rows.astype(np.uint32)
        return [
            cls(row[draft : draft + drafted], bool(is_found), row[COUNTS : COUNTS + produced])
            for row, (produced, drafted, is_found) in zip(tokens, rows[:, :COUNTS].tolist(), strict=True)
        ]
