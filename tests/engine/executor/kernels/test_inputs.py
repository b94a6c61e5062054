"""Compare inputs built on the device with the batch that the host builds for the same sequences."""

import numpy as np
import torch

from engine.executor.device_state import DeviceState, PaddedDrafts
from engine.executor.kernels import inputs as inputs_module
from engine.executor.kernels.inputs import build_inputs
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence
from tests.engine.steps import Entry, batch_of, spans_of
from tests.engine.tables import give_pages, install

VOCAB = 3
"""Number of token ids; few, so that drafts are often right."""
PAGE_SIZE = 4
PAGES = 400
"""Number of pages; the scratch page follows them."""
MAX_LENGTH = 40
SCRATCH = PAGES * PAGE_SIZE


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
    state = DeviceState(len(sequences) + 1, MAX_LENGTH, MAX_LENGTH // PAGE_SIZE, PAGES, torch.device(device))
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


def random_step(seed, device):
    """Planned sequences with drafts and pages, their state, and the arguments of a step with some padding rows."""
    rng = np.random.default_rng(seed)
    sequences = [new_sequence(rng) for _ in range(rng.integers(1, 6))]
    max_draft = int(rng.integers(0, 7))
    entries = random_entries(sequences, rng, max_draft)
    free = iter(rng.permutation(PAGES).tolist())
    for entry in entries:
        count = -(-(len(entry.sequence) + len(entry.draft)) // PAGE_SIZE)
        give_pages(entry.sequence, [next(free) for _ in range(count)])
    state, slots = state_of(sequences, device)
    drafts = padded_drafts(entries, max_draft, device, rng=rng)
    widths = [1 + len(entry.draft) + int(rng.integers(0, 3)) for entry in entries]
    starts = torch.tensor(np.cumsum([0, *widths]), dtype=torch.int32, device=device)
    return entries, state, (slots, drafts, starts, sum(widths) + int(rng.integers(0, 3)), PAGE_SIZE)


def matches(entries, slots, inputs):
    """Whether inputs are those of `build_batch`, and padding elsewhere."""
    batch = batch_of(entries, PAGE_SIZE)
    tokens, positions, cache_slots, request_slots, starts, contexts, counts = (part.tolist() for part in inputs)
    good = contexts == [entry.computed for entry in entries]
    good &= counts == np.diff(batch.logit_offsets).tolist()
    for index, span in enumerate(spans_of(batch)):
        own = slice(span.start, span.start + span.length)
        rows = slice(starts[index], starts[index + 1])
        pad = starts[index + 1] - starts[index] - span.length
        good &= tokens[rows] == [*batch.tokens[own].tolist(), *[0] * pad]
        good &= positions[rows] == [*batch.positions[own].tolist(), *[0] * pad]
        good &= cache_slots[rows] == [*batch.slots[own].tolist(), *[SCRATCH] * pad]
        good &= request_slots[rows] == [int(slots[index])] * (starts[index + 1] - starts[index])
    after = slice(starts[-1], None)
    return (
        good
        and not any(tokens[after])
        and set(cache_slots[after]) <= {SCRATCH}
        and set(request_slots[after]) <= {len(entries) + 1}
    )


def agrees(operation, implementation, seed):
    entries, state, step = random_step(seed, implementation.device)
    return matches(entries, step[0], implementation.of(operation)(state, *step))


def test_inputs_equal_those_of_build_batch(implementation, monkeypatch):
    # Several blocks of the kernel for a sequence.
    monkeypatch.setattr(inputs_module, "BLOCK", 4)
    assert all(agrees(build_inputs, implementation, seed) for seed in range(implementation.cases))


def test_idle_slots_and_those_of_ended_sequences_have_no_rows():
    sequence = Sequence(0, Request(np.arange(5, dtype=np.uint32)), 9)
    give_pages(sequence, [3, 5])
    state, _ = state_of([sequence, sequence, sequence], "cpu")
    state.limits[0] = 0
    state.limits[1] = 5
    slots = torch.tensor([0, 1, state.idle, state.idle])
    drafts = PaddedDrafts(torch.ones(4, 3, dtype=torch.int32), torch.full((4,), 3, dtype=torch.int32))
    inputs = build_inputs(state, slots, drafts, torch.arange(0, 17, 4, dtype=torch.int32), 18, PAGE_SIZE)
    for left in (inputs.tokens, inputs.positions, inputs.counts):
        assert not left.any()
    assert (inputs.cache_slots == SCRATCH).all()


def test_pages_are_appended_where_each_table_ends():
    state = DeviceState(3, 20, 6, PAGES, torch.device("cpu"))
    for added in ([[2, 2, 0], [0, 1, 0], [7, 8, 1]], [[0, 0, 0, 2], [1, 2, 3, 2], [4, 5, 6, 9]], [[], [], []]):
        slots, places, pages = np.array(added, int)
        state.add_pages(np.stack((slots * 6 + places, pages)))
    none = [PAGES] * 6
    expected = [[1, 4, 5, 6, *none[:2]], none, [7, 8, 9, *none[:3]], none]
    assert state.page_tables.tolist() == expected
    assert state.page_tables.dtype == torch.int32
