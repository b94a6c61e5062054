"""Keep the slots of a drafter's layers up to date with the committed tokens.

After a step the target's states of its committed tokens are stored. The slots that depend on them are written together
with the next draft, in the same forward pass. While nothing is drafted they may be missing, also in pages that other
sequences share; such pages are marked, and their slots are written before the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.drafters.compiled.network import MAX_ROWS as MAX_COMPILED_ROWS
from engine.drafters.draft_forward import DraftForward, DraftSpan
from engine.executor.batch import rows_before
from engine.executor.transfer import on_device
from engine.models.heads.head import DraftHead, HeadOutput
from engine.scheduling.plan import StepPlan
from engine.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from engine.drafters.compiled.drafting import CompiledDrafting

MAX_ROWS = 2048
"""Largest number of tokens in a forward pass that writes missing slots, which limits its memory."""


class Slots:
    """Slots of one sequence."""

    def __init__(self, filled: int, computed: int, preemptions: int, complete_pages: int) -> None:
        self.filled = filled
        """Number of leading slots that are written."""
        self.computed = computed
        """Number of leading positions that the target has computed."""
        self.preemptions = preemptions
        """Number of preemptions of the sequence; a later one frees its pages."""
        self.complete_pages = complete_pages
        """Number of leading pages whose slots are all written and that are marked so."""
        self.drafted = np.empty(0, np.uint32)
        """uint32 [n]: draft tokens in the slots from `filled` on."""
        self.follows_step = False
        """Whether the last launched step of the graph executor writes the slots of the tokens that it commits."""

    def keep_drafted(self, tokens: np.ndarray) -> None:
        """Count slots of draft tokens that were committed as written; tokens: uint32, all tokens of the sequence."""
        if len(self.drafted):
            committed = tokens[self.filled : self.filled + len(self.drafted)]
            equal = self.drafted[: len(committed)] == committed
            self.filled += int(np.append(equal, False).argmin())
            self.drafted = self.drafted[:0]
        # The last token always runs, because its output is needed.
        self.filled = min(self.filled, len(tokens) - 1)


class RunSpan(NamedTuple):
    """Committed tokens of one sequence whose slots are to be written."""

    sequence: Sequence
    slots: Slots
    end: int
    """Slot after the last one."""
    text: Tensor | None = None
    """int32 [at least `end`]: tokens of the sequence on the device, if a step in flight commits some of them."""


class SlotWriter:
    """Runs a head over committed tokens, for all sequences of a drafter."""

    def __init__(self, head: DraftHead, forward: DraftForward, compiled: CompiledDrafting | None = None) -> None:
        """compiled: runs few tokens in place of the head; it has the same layers."""
        self._head = head
        self._compiled = compiled
        self._forward = forward
        self._slots: dict[int, Slots] = {}
        weight = next(head.parameters())
        self.states = weight.new_zeros((forward.page_count + 1) * forward.page_size, head.state_size)
        """[cache slots, S]: the target's state of the position in each slot of the KV cache. The last page is that of
        padding."""
        self._is_complete = np.zeros(forward.page_count, np.bool_)
        """bool [pages]: whether all slots of a page that is full of computed tokens are written."""

    def run_committed(self, sequences: SequenceOf[Sequence]) -> HeadOutput:
        """Run all committed tokens whose slots are not written yet; return the output after each sequence's last."""
        spans = []
        for sequence in sequences:
            slots = self.current(sequence)
            slots.keep_drafted(sequence.tokens)
            spans.append(RunSpan(sequence, slots, len(sequence)))
        lasts = np.cumsum([span.end - span.slots.filled for span in spans]) - 1
        output = self._write(spans)
        rows = on_device(lasts, self._forward.device)
        return HeadOutput(output.hidden[rows], output.state[rows])

    def of(self, sequence: Sequence) -> Slots | None:
        """Return the slots of a sequence, None before the first result of the sequence."""
        return self._slots.get(sequence.sequence_id)

    def current(self, sequence: Sequence) -> Slots:
        """Return the slots of a sequence of which the target has computed all known tokens but the last."""
        return self._at(sequence, len(sequence) - 1)

    def observe(
        self, plan: StepPlan, computed: np.ndarray, hidden: Tensor | None, offsets: np.ndarray, *, fills_pages: bool
    ) -> None:
        """Store the states of tokens that a step has computed.

        computed: int64 [B], number of computed tokens of each sequence after the step. hidden, offsets: see
        `StepResult`. fills_pages: whether to write all slots of pages that became full.
        """
        size, sequences = self._forward.page_size, plan.table.of(plan.all_rows)
        if hidden is not None and self._head.state_size:
            self._keep_states(sequences, plan.computed, hidden, offsets)
        full = []
        for sequence, before, after in zip(sequences, plan.computed.tolist(), computed.tolist(), strict=True):
            slots = self._at(sequence, before)
            slots.computed = after
            end = min(after, len(sequence) - 1)
            if fills_pages and end // size > slots.filled // size:
                slots.keep_drafted(sequence.tokens)
                full.append(RunSpan(sequence, slots, max(slots.filled, end)))
            self._mark_pages(sequence, slots)
        self.fill(full)

    def observe_step(self, sequence: Sequence, *, is_filled: bool) -> None:
        """Count the tokens that a step of the graph executor committed. is_filled: whether it wrote their slots."""
        slots = self._slots[sequence.sequence_id]
        slots.computed = len(sequence) - 1
        if is_filled:
            slots.filled = len(sequence)
        self._mark_pages(sequence, slots)

    def fill(self, spans: SequenceOf[RunSpan]) -> None:
        """Write the slots from `Slots.filled` to the end of each span."""
        while spans := [span for span in spans if span.slots.filled < span.end]:
            share = max(1, MAX_ROWS // len(spans))
            self._write([span._replace(end=min(span.end, span.slots.filled + share)) for span in spans])

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._slots.pop(sequence.sequence_id, None)

    def _write(self, spans: SequenceOf[RunSpan]) -> HeadOutput:
        """Run the head for the slots from `Slots.filled` to the end of each span; return its output for all rows."""
        output = self._run(spans)
        for span in spans:
            span.slots.filled = span.end
            self._mark_pages(span.sequence, span.slots)
        return output

    def _run(self, spans: SequenceOf[RunSpan]) -> HeadOutput:
        runs = [DraftSpan(span.sequence.pages, span.slots.filled, span.end - span.slots.filled) for span in spans]
        tokens = self._tokens(spans)
        if self._compiled is not None and len(tokens) <= MAX_COMPILED_ROWS:
            return self._compiled.run(runs, tokens.numpy(), self.states)
        rows = self._forward.begin(runs, on_target=self._head.shares_target_cache)
        states = self.states[:0]
        if self._head.state_size:
            # The state of a slot is that of the position before it.
            states = self.states[self._cache_slots([(run.pages, run.start - 1, run.length) for run in runs])]
        return self._head(tokens, states, rows.positions, rows.attend, self._forward.ops)

    def _tokens(self, spans: SequenceOf[RunSpan]) -> Tensor:
        """Return the tokens of the rows of `_write`, int64."""
        if all(span.text is None for span in spans):
            tokens = np.concatenate([span.sequence.tokens[span.slots.filled : span.end] for span in spans])
            return on_device(tokens.astype(np.int64), self._forward.device)
        return torch.cat([span.text[span.slots.filled : span.end] for span in spans if span.text is not None]).long()

    def _keep_states(
        self, sequences: SequenceOf[Sequence], computed: np.ndarray, hidden: Tensor, offsets: np.ndarray
    ) -> None:
        """Store the target's states of the committed tokens that a step has computed."""
        # Rows after the end of an output are not committed.
        committed = np.array([len(sequence) for sequence in sequences]) - computed
        counts = np.minimum(np.diff(offsets), committed)
        runs = [(each.pages, *run) for each, *run in zip(sequences, computed.tolist(), counts.tolist(), strict=True)]
        if counts.sum() < len(hidden):
            hidden = hidden[on_device(rows_before(offsets[:-1] + counts, counts), hidden.device)]
        self.states[self._cache_slots(runs)] = self._head.target_states(hidden)

    def _cache_slots(self, runs: SequenceOf[tuple[list[int], int, int]]) -> Tensor:
        """Return the slots in the KV cache of consecutive positions of sequences, int64 [sum of counts].

        runs: page table, first position and number of positions of each sequence.
        """
        size = self._forward.page_size
        slots = [
            pages[position // size] * size + position % size
            for pages, first, count in runs
            for position in range(first, first + count)
        ]
        return on_device(np.array(slots, np.int64), self._forward.device)

    def _at(self, sequence: Sequence, computed: int) -> Slots:
        """Return the slots of a sequence of which `computed` tokens are computed.

        After a prefix-cache hit or a preemption they are those of the pages in its table.
        """
        slots = self._slots.get(sequence.sequence_id)
        if slots is None or slots.computed != computed or slots.preemptions != sequence.preemptions:
            slots = self._slots[sequence.sequence_id] = self._restarted(sequence, computed)
        return slots

    def _restarted(self, sequence: Sequence, start: int) -> Slots:
        """Return the slots of a sequence whose first `start` tokens were found in the prefix cache."""
        size = self._forward.page_size
        if self._head.shares_target_cache or start == 0:
            return Slots(max(start, self._head.first_slot), start, sequence.preemptions, 0)
        assert start % size == 0, "the prefix cache returns whole pages"
        is_complete = self._is_complete[sequence.pages[: start // size]]
        complete = int(np.append(is_complete, False).argmin())
        return Slots(max(complete * size, self._head.first_slot), start, sequence.preemptions, complete)

    def _mark_pages(self, sequence: Sequence, slots: Slots) -> None:
        """Mark the pages of computed tokens after the first ones that are complete."""
        size, done = self._forward.page_size, slots.complete_pages
        full = slots.computed // size
        if full > done:
            self._is_complete[sequence.pages[done:full]] = np.arange(done, full) < slots.filled // size
            slots.complete_pages = min(full, max(done, slots.filled // size))
