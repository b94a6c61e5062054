"""Keep the slots of a drafter's layers up to date with the committed tokens.

After a step the target's states of its committed tokens are known. The slots that depend on them are written together
with the next draft, in the same forward pass, or at the latest when they fill a page, because then other sequences may
share it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.drafters.draft_forward import DraftForward, DraftSpan
from engine.executor.transfer import on_device
from engine.models.heads.head import DraftHead, HeadOutput
from engine.scheduling.plan import SequenceResult
from engine.scheduling.sequence import Sequence


class Slots:
    """Slots of one sequence: which are written, and the states from which the next ones are computed."""

    def __init__(self, filled: int, states: Tensor) -> None:
        """filled: number of leading slots that are written. states: [1 or 0, S], of position `filled` - 1."""
        self.filled = filled
        self.states = states
        """[n, S]: the target's states of positions `filled` - 1 .. `computed` - 1; without rows if the head needs
        none."""
        self.computed = filled
        """Number of leading positions that the target has computed."""
        self.drafted = np.empty(0, np.uint32)
        """uint32 [n]: draft tokens in the slots from `filled` on."""

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


class SlotWriter:
    """Runs a head over committed tokens, for all sequences of a drafter."""

    def __init__(self, head: DraftHead, forward: DraftForward) -> None:
        self._head = head
        self._forward = forward
        self._slots: dict[int, Slots] = {}
        weight = next(head.parameters())
        size = head.state_size
        self._nothing = weight.new_empty(0, size)
        self.page_states = weight.new_zeros(forward.page_count + 1 if size else 0, size)
        """[pages + 1, S]: the target's state of the last position of every page, for sequences that share the page. The
        last row belongs to the page of padding."""

    def run_committed(self, sequences: SequenceOf[Sequence]) -> HeadOutput:
        """Run all committed tokens whose slots are not written yet; return the output after each sequence's last."""
        spans = []
        for sequence in sequences:
            slots = self._slots[sequence.sequence_id]
            if self._head.shares_target_cache:
                slots.filled = len(sequence) - 1
            slots.keep_drafted(sequence.tokens)
            spans.append(RunSpan(sequence, slots, len(sequence)))
        lasts = np.cumsum([span.end - span.slots.filled for span in spans]) - 1
        output = self._write(spans)
        rows = on_device(lasts, self._forward.device)
        return HeadOutput(output.hidden[rows], output.state[rows])

    def of(self, sequence: Sequence) -> Slots | None:
        """Return the slots of a sequence, None before the first result of the sequence."""
        return self._slots.get(sequence.sequence_id)

    def observe(self, results: SequenceOf[SequenceResult]) -> None:
        """Take over the states of computed tokens, and fill complete pages."""
        size = self._forward.page_size
        full = []
        for result, states in zip(results, self._target_states(results), strict=True):
            sequence, slots = result.plan.sequence, self._advance(result, states)
            computed = min(slots.computed, len(sequence) - 1)
            if not self._head.shares_target_cache and computed // size > slots.filled // size:
                slots.keep_drafted(sequence.tokens)
                full.append(RunSpan(sequence, slots, max(slots.filled, computed)))
        full = [span for span in full if span.end > span.slots.filled]
        if full:
            self._write(full)

    def _write(self, spans: SequenceOf[RunSpan]) -> HeadOutput:
        """Run the head for the slots from `Slots.filled` to the end of each span; return its output for all rows."""
        forward, begin = self._forward, self._forward.begin
        if self._head.shares_target_cache:
            begin = forward.begin_on_target
        counts = [span.end - span.slots.filled for span in spans]
        rows = begin(
            [
                DraftSpan(span.sequence.pages, span.slots.filled, count)
                for span, count in zip(spans, counts, strict=True)
            ]
        )
        tokens = np.concatenate([span.sequence.tokens[span.slots.filled : span.end] for span in spans])
        states = torch.cat([span.slots.states[:count] for span, count in zip(spans, counts, strict=True)])
        tokens_on_device = on_device(tokens.astype(np.int64), forward.device)
        output = self._head(tokens_on_device, states, rows.positions, rows.attend, forward.ops)
        for span, count in zip(spans, counts, strict=True):
            span.slots.filled = span.end
            span.slots.states = span.slots.states[count:]
        return output

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._slots.pop(sequence.sequence_id, None)

    def hand_over(self, sequences: SequenceOf[Sequence]) -> None:
        """Write the slots of all committed tokens and forget the sequences, whose slots the device writes from now on.

        The target has computed all tokens but the last of each sequence.
        """
        spans = []
        for sequence in sequences:
            computed = len(sequence) - 1
            slots = self._slots.pop(sequence.sequence_id, None)
            if slots is None or slots.computed != computed:  # no token was computed since a prefix-cache hit
                slots = self._restarted(sequence, computed)
            if slots.filled <= computed:
                slots.keep_drafted(sequence.tokens)
                spans.append(RunSpan(sequence, slots, len(sequence)))
        if spans:
            self._write(spans)

    def take_back(self, sequence: Sequence, state: Tensor) -> None:
        """Continue a sequence whose slots the device has written. state: [S], the target's of the last token but one,
        after which nothing was computed.
        """
        self._slots[sequence.sequence_id] = Slots(len(sequence) - 1, state[None])

    def _target_states(self, results: SequenceOf[SequenceResult]) -> list[Tensor]:
        """Return the target's states of each result's committed tokens, [n, S] each."""
        parts = []
        for result in results:
            if result.hidden is not None and self._head.state_size:
                # Rows after the end of an output are not committed.
                parts.append(result.hidden[: len(result.plan.sequence) - result.plan.computed])
        if not parts:
            return [self._nothing] * len(results)
        return list(self._head.target_states(torch.cat(parts)).split([len(part) for part in parts]))

    def _advance(self, result: SequenceResult, states: Tensor) -> Slots:
        """Return the slots of a sequence after a step; states: [n, S], of the committed tokens that it computed."""
        sequence, start = result.plan.sequence, result.plan.computed
        slots = self._slots.get(sequence.sequence_id)
        if slots is None or slots.computed != start:  # a new sequence, or one that was preempted
            slots = self._slots[sequence.sequence_id] = self._restarted(sequence, start)
        if not self._head.state_size:
            # In a combination the accepted tokens may come from another drafter, so the text tells how many there are.
            slots.computed = len(sequence) - 1 if result.plan.produces else start + result.plan.scheduled
            return slots
        size = self._forward.page_size
        if (start + len(states)) // size > start // size:
            lasts = np.arange(start + (-start - 1) % size, start + len(states), size)
            pages = np.array(sequence.pages, np.int64)[lasts // size]
            self.page_states[on_device(pages, states.device)] = states[on_device(lasts - start, states.device)]
        slots.states = torch.cat((slots.states, states)) if len(slots.states) else states
        slots.computed = start + len(states)
        return slots

    def _restarted(self, sequence: Sequence, start: int) -> Slots:
        """Return the slots of a sequence whose first `start` tokens were found in the prefix cache."""
        if self._head.shares_target_cache or start == 0:
            return Slots(max(start, self._head.first_slot), self._nothing)
        assert start % self._forward.page_size == 0, "the prefix cache returns whole pages"
        if not self._head.state_size:
            return Slots(start, self._nothing)
        page = sequence.pages[start // self._forward.page_size - 1]
        return Slots(start, self.page_states[page][None])
