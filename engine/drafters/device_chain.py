"""Chains of draft tokens that a head makes on the device, within the steps of the graph executor.

At the end of a step, after verification, the head runs once over the rows of the step: the target's state of each row
and the target's token after it. This writes the slots of all committed tokens, so that full pages can be shared at
once; the slots of rejected rows are overwritten later. The draft for the next step follows the last committed token,
one forward pass per further position, and is sampled with the target's own noise. All inputs are computed on the
device, so that the next step can be launched before the host knows the outcome of this one.

Plain steps, which neither verify nor draft, only store the target's states. The slots of their tokens are written
before the next step that drafts. A plain step commits one token per sequence, so the host knows their positions without
its outcome.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import FixedAttention, RaggedRows, StepShape
from engine.drafters.draft_forward import DraftForward
from engine.drafters.drafts import Drafts
from engine.drafters.slots import RunSpan, SlotWriter
from engine.executor.batch import offsets
from engine.executor.device_state import DeviceState, StepInputs
from engine.models.heads.head import DraftHead, HeadOutput
from engine.scheduling.plan import StepPlan
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from ssd.types import ROOT, DraftBatch, offsets_of

Choose = Callable[[StepInputs, Tensor], Tensor]
"""Returns the tokens that greedy decoding or the requests' noise chooses after rows, int64 [N], from float32 logits
[N, V]."""


class DeviceChain:
    """The head of a drafter, and the drafts and states of running sequences on the device."""

    def __init__(
        self, head: DraftHead, forward: DraftForward, writer: SlotWriter, depth: int, slots: int, source: int
    ) -> None:
        """writer: the slots of sequences that the eager executor runs. depth: number of draft tokens. slots: number of
        request slots. source: code of the draft tokens, see `engine.drafters.sources`.
        """
        self.head = head
        self.forward = forward
        self.depth = depth
        self.source = source
        self.states = writer.states
        """See `SlotWriter`."""
        self.drafts = torch.zeros(slots + 1, depth, dtype=torch.int32, device=forward.device)
        """int32 [slots + 1, depth]: draft of each request slot for its next step; the last slot is the idle one."""
        self._writer = writer

    def fixed(self, state: DeviceState, shape: StepShape) -> FixedChain:
        """Return the drafting of steps of one shape."""
        return FixedChain(self, state, shape)

    @torch.inference_mode()
    def observe_prompts(self, prompts: StepPlan, hidden: Tensor) -> None:
        """Process prompt tokens that run before a step. hidden: [N, layers, hidden size], of all of them."""
        computed = prompts.computed + prompts.scheduled
        self._writer.observe(prompts, computed, hidden, offsets(prompts.scheduled), fills_pages=prompts.is_drafting)

    @torch.inference_mode()
    def prepare(self, plan: StepPlan, text_of: Callable[[Sequence], Tensor]) -> None:
        """Set the number of draft tokens of each producing sequence, and write missing slots if the step drafts.

        All tokens of the sequences but the last one are computed. text_of: returns the tokens of a sequence on the
        device, int32 [at least its length].
        """
        missing = []
        plan.drafts, plan.lengths = self.drafts_of(np.zeros((plan.producers, self.depth), np.int32)), self._rooms(plan)
        for index, sequence in enumerate(plan.producing):
            slots = self._writer.current(sequence)
            # Drafts are made at the end of the previous step.
            if not (plan.is_drafting and slots.follows_step):
                plan.lengths[index] = 0
            if plan.is_drafting and not slots.follows_step:
                slots.keep_drafted(sequence.tokens)
                # A step in flight is a plain one.
                missing.append(RunSpan(sequence, slots, len(sequence) + sequence.in_flight, text_of(sequence)))
            slots.follows_step = plan.is_drafting
        self._writer.fill(missing)

    def drafts_of(self, tokens: np.ndarray) -> Drafts:
        """Return the drafts of a step, given their tokens, int32 [P, depth]; shorter ones are padded."""
        count = tokens.size
        parents, accept_prob = np.tile(np.arange(ROOT, self.depth + ROOT, dtype=np.int32), len(tokens)), np.ones(count)
        source, lengths = np.full(count, self.source, np.uint8), np.full(len(tokens), self.depth)
        arrays = tokens.astype(np.uint32).ravel(), parents, accept_prob.astype(np.float32), source, offsets_of(lengths)
        return Drafts(DraftBatch(*arrays))

    def observe(self, result: StepResult) -> None:
        """Process the results of a step whose tokens are committed."""
        plan = result.plan
        for index in np.flatnonzero(result.lengths).tolist():
            self._writer.observe_step(plan.producing[index], is_filled=plan.is_drafting)

    def end(self, sequence: Sequence) -> None:
        """Let the eager executor continue a sequence; no step is in flight."""
        slots = self._writer.of(sequence)
        if slots is not None:
            slots.follows_step = False

    def _rooms(self, plan: StepPlan) -> np.ndarray:
        """Return the largest numbers of draft tokens, int64 [P], which the head's context window limits, too."""
        return np.minimum(plan.rooms, self.head.config.max_positions - plan.ends).clip(0, self.depth)


class FixedChain:
    """Drafts after steps of B sequences on N rows."""

    def __init__(self, chain: DeviceChain, state: DeviceState, shape: StepShape) -> None:
        self._chain = chain
        self._state = state
        self._rows = chain.forward.fixed(shape)
        # One row per sequence.
        single = StepShape(shape.sequences, shape.sequences, 1, shape.pages)
        self._single = chain.forward.fixed(single) if chain.depth > 1 else None
        device = state.lengths.device
        self._starts = torch.arange(shape.sequences + 1, dtype=torch.int32, device=device)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states the head reads."""
        return self._chain.head.hidden_layers

    def plan(self, contexts: np.ndarray, rows: np.ndarray) -> None:
        """Prepare a step; see `FixedAttention.plan` for the target's arguments."""
        # Slot t of the head belongs to the target's row t - 1.
        self._rows.plan(contexts + 1, rows)
        if self._single is not None:
            depth = self._chain.depth
            self._single.plan(contexts + rows + depth, np.ones_like(rows))

    def drafts(self, slots: Tensor) -> Tensor:
        """Return the drafts that the previous step made, int32 [B, depth]. slots: int64 [B], request slots."""
        return self._chain.drafts[slots]

    def keep_states(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """Store the target's states of all rows and return them, [N, S]. hidden: as for `draft`."""
        chain = self._chain
        if not chain.head.state_size:
            return chain.states[inputs.cache_slots]
        states = chain.head.target_states(hidden)
        chain.states[inputs.cache_slots] = states
        return states

    def draft(
        self, slots: Tensor, inputs: StepInputs, hidden: Tensor, tokens: Tensor, counts: Tensor, choose: Choose
    ) -> None:
        """Write the slots of the tokens that a step committed, and draft for the next step.

        slots: int64 [B], request slots. hidden: [N, layers, hidden size], of the step's rows. tokens: int64 [N], the
        target's token after each row. counts: int32 [B], number of tokens that each sequence committed.
        """
        head, chain = self._chain.head, self._chain
        states = self.keep_states(inputs, hidden)
        pairs = self._pairs(inputs, tokens)
        output = self._run(self._rows, slots, pairs, states)
        last = (inputs.starts[:-1] + (counts - 1).clamp(min=0)).clamp(max=len(tokens) - 1).long()
        row = self._single_rows(slots, 0, pairs.tokens[last])
        output = HeadOutput(output.hidden[last], output.state[last])
        drafts = [choose(row, head.target_logits(output.hidden))]
        for place in range(1, chain.depth):
            assert self._single is not None
            row = self._single_rows(slots, place, drafts[-1])
            output = self._run(self._single, slots, row, output.state)
            drafts.append(choose(row, head.target_logits(output.hidden)))
        chain.drafts[slots] = torch.stack(drafts, dim=1).int()

    def _pairs(self, inputs: StepInputs, tokens: Tensor) -> StepInputs:
        """Return the rows of the head: the token after each of the step's rows, one position later."""
        positions = inputs.positions + 1
        is_padding = inputs.cache_slots // self._chain.forward.page_size == self._state.scratch_page
        return inputs._replace(
            tokens=tokens,
            positions=positions,
            cache_slots=self._cache_slots(inputs.request_slots, positions, ~is_padding),
            contexts=inputs.contexts + 1,
        )

    def _single_rows(self, slots: Tensor, place: int, tokens: Tensor) -> StepInputs:
        """Return one row per sequence, `place` positions after its last committed token. tokens: int64 [B]."""
        # The keys of positions beyond the longest text go to the padding's page; drafts there are never verified.
        wanted = self._state.lengths[slots] - 1 + place
        limits = self._state.limits[slots]
        positions = torch.minimum(wanted, limits - 1).clamp(min=1)
        return StepInputs(
            tokens=tokens,
            positions=positions.long(),
            cache_slots=self._cache_slots(slots, positions, wanted < limits),
            request_slots=slots,
            starts=self._starts,
            contexts=positions,
            counts=torch.ones_like(positions),
        )

    def _cache_slots(self, request_slots: Tensor, positions: Tensor, exists: Tensor) -> Tensor:
        """Return the cache slots of positions, int64 [N]; rows that do not exist get one of the padding's page."""
        size, tables = self._chain.forward.page_size, self._state.page_tables
        pages = tables[request_slots, (positions // size).clamp(max=tables.shape[1] - 1)]
        return torch.where(exists, pages * size + positions % size, self._state.scratch_page * size).long()

    def _run(self, attention: FixedAttention, slots: Tensor, rows: StepInputs, states: Tensor) -> HeadOutput:
        tables = self._state.page_tables[slots]
        attend = attention.begin(RaggedRows(rows.cache_slots, rows.starts, rows.contexts, tables))
        output: HeadOutput = self._chain.head(rows.tokens, states, rows.positions, attend, self._chain.forward.ops)
        return output
