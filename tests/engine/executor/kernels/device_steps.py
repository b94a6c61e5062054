"""Sequences on the host, and the same in request slots of a device state."""

from __future__ import annotations

import numpy as np
import torch

from engine.executor.device_state import NOT_RECORDED, DeviceState
from engine.executor.kernels.tensors import Drafts
from engine.scheduling.plan import NO_TOKENS, SequencePlan
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence

VOCAB = 3
"""Few tokens, so that drafts are often right."""
PAGE_SIZE = 4
PAGES = 400
"""The scratch page follows them."""
MAX_LENGTH = 40


def new_sequence(rng):
    """A sequence with part of its prompt computed; every second one replays a recorded output."""
    prompt = rng.integers(0, VOCAB, rng.integers(1, 12)).astype(np.uint32)
    sampling = SamplingParams(temperature=1.0, seed=int(rng.integers(-(1 << 62), 1 << 62)))
    recorded = rng.integers(0, VOCAB, len(prompt)).astype(np.uint32) if sampling.seed % 2 else None
    sequence = Sequence(0, Request(prompt, sampling, recorded=recorded), len(prompt) + int(rng.integers(1, 20)))
    sequence.computed = int(rng.integers(0, len(prompt)))
    return sequence


def give_drafts(sequences, rng, most):
    """Schedule all or some of the tokens to run, with any draft behind them that fits."""
    for sequence in sequences:
        left = len(sequence) - sequence.computed
        sequence.scheduled = left if rng.random() < 0.7 else int(rng.integers(1, left + 1))
        sequence.draft, sequence.tree = NO_TOKENS, None
        sequence.produces = sequence.computed + sequence.scheduled == len(sequence)
        if sequence.produces:
            size = int(rng.integers(0, min(most, sequence.room - 1) + 1))
            sequence.draft = rng.integers(0, VOCAB, size).astype(np.uint32)


def planned(sequences):
    """The step that `give_drafts` gave the sequences, as entries of a plan."""
    return [
        SequencePlan(each, each.computed, each.scheduled, each.produces, draft=each.draft, tree=each.tree)
        for each in sequences
    ]


def state_of(sequences, device):
    """A state that holds the sequences, and their request slots, int64 [B]."""
    slots = list(range(len(sequences)))[::-1]
    state = DeviceState.empty(len(sequences) + 1, MAX_LENGTH, MAX_LENGTH // PAGE_SIZE, PAGES, torch.device(device))
    for slot, sequence in zip(slots, sequences, strict=True):
        state.assign(slot, sequence, sequence.computed)
    return state, torch.tensor(slots, dtype=torch.int64, device=device)


def padded_drafts(sequences, most, device, *, rng):
    """The drafts as the device gets them: random tokens as padding, and drafts longer than a sequence has room for."""
    tokens = rng.integers(0, VOCAB, (len(sequences), most)).astype(np.int32)
    lengths = np.zeros(len(sequences), np.int32)
    for index, sequence in enumerate(sequences):
        size = len(sequence.draft)
        tokens[index, :size] = sequence.draft
        is_cut = not sequence.produces or size == sequence.room - 1
        lengths[index] = most if is_cut else size
    return Drafts(*(torch.from_numpy(array).to(device) for array in (tokens, lengths)))


def history_of(sequence):
    """The expected row of the state's history."""
    known = [*sequence.tokens.tolist(), *sequence.recorded_rest.tolist()]
    return known + [NOT_RECORDED] * (MAX_LENGTH - len(known))


def same_state(state, sequences, slots):
    """Whether the slots hold what the sequences hold."""
    return all(
        (
            int(state.lengths[slot]) == len(sequence)
            and int(state.computed[slot]) == sequence.computed
            and int(state.last_tokens[slot]) == int(sequence.tokens[-1])
            and state.history[slot].tolist() == history_of(sequence)
        )
        for slot, sequence in zip(slots.tolist(), sequences, strict=True)
    )
