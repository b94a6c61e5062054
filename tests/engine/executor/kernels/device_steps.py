"""Sequences on the host, and the same sequences in request slots of a device state."""

from __future__ import annotations

import numpy as np
import torch

from engine.executor.device_state import DeviceState, PaddedDrafts
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence
from tests.engine.steps import Entry
from tests.engine.tables import install

VOCAB = 3
"""Number of token ids; few, so that drafts are often right."""
PAGE_SIZE = 4
PAGES = 400
"""Number of pages; the scratch page follows them."""
MAX_LENGTH = 40


def new_sequence(rng):
    """A sequence whose prompt is computed except for its last token; every second one replays a recorded output."""
    prompt = rng.integers(0, VOCAB, rng.integers(1, 12)).astype(np.uint32)
    sampling = SamplingParams(temperature=1.0, seed=int(rng.integers(-(1 << 62), 1 << 62)))
    recorded = rng.integers(0, VOCAB, len(prompt)).astype(np.uint32) if sampling.seed % 2 else None
    sequence = Sequence(0, Request(prompt, sampling, recorded=recorded), len(prompt) + int(rng.integers(1, 20)))
    sequence.computed = len(prompt) - 1
    return sequence


def random_entries(sequences, rng, max_draft):
    """Plan the last token of each sequence, and a draft for which it has room."""
    entries = []
    for sequence in sequences:
        size = int(rng.integers(0, min(max_draft, sequence.room - 1) + 1))
        draft = rng.integers(0, VOCAB, size).astype(np.uint32)
        entries.append(Entry(sequence, sequence.computed, 1, draft))
    return entries


def state_of(sequences, device):
    """A state that holds the sequences, and their request slots, int64 [B]."""
    slots = list(range(len(sequences)))[::-1]
    state = DeviceState.empty(len(sequences) + 1, MAX_LENGTH, MAX_LENGTH // PAGE_SIZE, PAGES, torch.device(device))
    for slot, sequence in zip(slots, sequences, strict=True):
        install(state, slot, sequence)
    return state, torch.tensor(slots, dtype=torch.int64, device=device)


def padded_drafts(entries, max_draft, device, *, rng):
    """The drafts as the device gets them: random tokens as padding, and drafts longer than a sequence has room for."""
    tokens = rng.integers(0, VOCAB, (len(entries), max_draft)).astype(np.int32)
    lengths = np.zeros(len(entries), np.int32)
    for index, entry in enumerate(entries):
        size = len(entry.draft)
        tokens[index, :size] = entry.draft
        lengths[index] = max_draft if size == entry.sequence.room - 1 else size
    return PaddedDrafts(*(torch.from_numpy(array).to(device) for array in (tokens, lengths)))
