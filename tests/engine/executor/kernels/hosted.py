"""Sequences on the host, and the same in the seats of a device state."""

from __future__ import annotations

import numpy as np
import torch

from engine.executor.device_state import NOT_RECORDED, DeviceState
from engine.executor.kernels.drafted import Drafts
from engine.scheduling.plan import NO_TOKENS
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence

VOCAB = 3
"""Few tokens, so that drafts are often right."""
PAGE_SIZE = 4
PAGES = 400
"""The one behind them is scratch."""
LONGEST = 40


def new_sequence(rng):
    """A request of which some is computed, on pages anywhere."""
    prompt = rng.integers(0, VOCAB, rng.integers(1, 12)).astype(np.uint32)
    sampling = SamplingParams(temperature=1.0, seed=int(rng.integers(-(1 << 62), 1 << 62)))
    recorded = rng.integers(0, VOCAB, len(prompt)).astype(np.uint32) if sampling.seed % 2 else None
    sequence = Sequence(0, Request(prompt, sampling, recorded=recorded), len(prompt) + int(rng.integers(1, 20)))
    sequence.computed = int(rng.integers(0, len(prompt)))
    return sequence


def give_drafts(sequences, rng, most):
    """Schedule all or some of what is to run, with any draft behind it that fits."""
    for sequence in sequences:
        left = len(sequence) - sequence.computed
        sequence.scheduled = left if rng.random() < 0.7 else int(rng.integers(1, left + 1))
        sequence.draft, sequence.tree = NO_TOKENS, None
        sequence.produces = sequence.computed + sequence.scheduled == len(sequence)
        if sequence.produces:
            size = int(rng.integers(0, min(most, sequence.room - 1) + 1))
            sequence.draft = rng.integers(0, VOCAB, size).astype(np.uint32)


def state_of(sequences, device):
    """The sequences in seats of a state, and which these are."""
    places = list(range(len(sequences)))[::-1]
    state = DeviceState.empty(len(sequences) + 1, LONGEST, LONGEST // PAGE_SIZE, PAGES, torch.device(device))
    for seat, sequence in zip(places, sequences, strict=True):
        state.sit(seat, sequence)
    return state, torch.tensor(places, dtype=torch.int64, device=device)


def padded_drafts(sequences, most, device, *, rng):
    """With anything where there is no draft, and drafts for sequences that have no room for them."""
    tokens = rng.integers(0, VOCAB, (len(sequences), most)).astype(np.int32)
    lengths = np.zeros(len(sequences), np.int32)
    for index, sequence in enumerate(sequences):
        size = len(sequence.draft)
        tokens[index, :size] = sequence.draft
        is_cut = not sequence.produces or size == sequence.room - 1
        lengths[index] = most if is_cut else size
    return Drafts(*(torch.from_numpy(array).to(device) for array in (tokens, lengths)))


def history_of(sequence):
    """What its seat is to know of its text."""
    known = [*sequence.tokens.tolist(), *sequence.recorded_rest.tolist()]
    return known + [NOT_RECORDED] * (LONGEST - len(known))


def same_state(state, sequences, seats):
    """Whether the seats hold what the sequences are."""
    return all(
        (
            int(state.lengths[seat]) == len(sequence)
            and int(state.computed[seat]) == sequence.computed
            and int(state.last_tokens[seat]) == int(sequence.tokens[-1])
            and state.history[seat].tolist() == history_of(sequence)
        )
        for seat, sequence in zip(seats.tolist(), sequences, strict=True)
    )
