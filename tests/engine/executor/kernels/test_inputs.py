"""The inputs that the device makes, against the batch that the host makes of the same sequences."""

import numpy as np
import pytest
import torch

from engine.executor.batch import build_batch
from engine.executor.device_state import DeviceState
from engine.executor.kernels import inputs_torch as made
from engine.executor.kernels.inputs import build_inputs
from engine.scheduling.request import Request
from engine.scheduling.sequence import Sequence
from tests.engine.executor.kernels.backends import interpreted_kernels, planted
from tests.engine.executor.kernels.hosted import (
    PAGE_SIZE,
    PAGES,
    give_drafts,
    new_sequence,
    padded_drafts,
    state_of,
)

SCRATCH = PAGES * PAGE_SIZE
KERNEL_CASES = 40
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return device


def random_step(seed, device):
    """Sequences with drafts and pages, their state, and what the device is given for a step, with rows to spare."""
    rng = np.random.default_rng(seed)
    sequences = [new_sequence(rng) for _ in range(rng.integers(1, 6))]
    most = int(rng.integers(0, 7))
    give_drafts(sequences, rng, most)
    free = iter(rng.permutation(PAGES).tolist())
    for sequence in sequences:
        held = sequence.computed + sequence.scheduled + len(sequence.draft)
        sequence.pages = [next(free) for _ in range(-(-held // PAGE_SIZE))]
    state, seats = state_of(sequences, device)
    scheduled = torch.tensor([sequence.scheduled for sequence in sequences], dtype=torch.int32, device=device)
    drafts = padded_drafts(sequences, most, device, rng=rng)
    widths = [sequence.scheduled + len(sequence.draft) + int(rng.integers(0, 3)) for sequence in sequences]
    starts = torch.tensor(np.cumsum([0, *widths]), dtype=torch.int32, device=device)
    return sequences, state, (seats, scheduled, drafts, starts, sum(widths) + int(rng.integers(0, 3)), PAGE_SIZE)


def matches(sequences, inputs):
    """Whether inputs are those of `build_batch` where they count, and harmless elsewhere."""
    batch = build_batch(sequences, PAGE_SIZE)
    tokens, positions, slots, seats, starts = (
        getattr(inputs, name).tolist() for name in ("tokens", "positions", "slots", "seats", "starts")
    )
    drafted = inputs.drafted
    row_tokens = drafted.tokens.tolist()
    good = inputs.contexts.tolist() == [sequence.computed for sequence in sequences]
    good &= drafted.scheduled.tolist() == [sequence.scheduled for sequence in sequences]
    for index, span in enumerate(batch.spans):
        own = slice(span.start, span.start + span.length)
        rows = slice(starts[index], starts[index + 1])
        pad = starts[index + 1] - starts[index] - span.length
        good &= int(inputs.lengths[index]) == span.length
        good &= tokens[rows] == [*batch.tokens[own].tolist(), *[0] * pad]
        good &= positions[rows] == [*batch.positions[own].tolist(), *[0] * pad]
        good &= slots[rows] == [*batch.slots[own].tolist(), *[SCRATCH] * pad]
        good &= seats[rows] == [int(drafted.seats[index])] * (starts[index + 1] - starts[index])
        wanted = batch.logit_rows[batch.logit_offsets[index] : batch.logit_offsets[index + 1]]
        count = int(drafted.counts[index])
        good &= count == len(wanted)
        start = int(drafted.starts[index])
        good &= [start] * min(count, 1) == [row - span.start + starts[index] for row in wanted[:1].tolist()]
        good &= row_tokens[start : start + count] == batch.tokens[wanted].tolist()
    behind = slice(starts[-1], None)
    return (
        good
        and not any(tokens[behind])
        and set(slots[behind]) <= {SCRATCH}
        and set(seats[behind]) <= {len(sequences) + 1}
    )


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_are_those_of_the_batch(device):
    for seed in range(100):
        sequences, state, step = random_step(seed, on(device))
        inputs = build_inputs(state, *step)
        assert matches(sequences, inputs)


FAULTS = {
    "padding is written": ("torch.where(counts_in, pages * page_size", "torch.where(within >= 0, pages * page_size"),
    "an empty sequence takes the next one's rows": ("right=True", "right=False"),
    "drafts beyond the room": ("torch.minimum(drafts.lengths, room - 1)", "drafts.lengths"),
    "drafts within prompts": ("torch.where(produces, torch.minimum", "torch.where(runs > 0, torch.minimum"),
    "pages of another token": ("state.page_tables, seat, places", "state.page_tables, seat, places + 1"),
    "rows that produce begin early": ("starts[:-1] + scheduled - 1", "starts[:-1] + scheduled - 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, tmp_path):
    module = planted(made, *FAULTS[fault], tmp_path)
    steps = [random_step(seed, "cpu") for seed in range(100)]
    assert not all(matches(sequences, module.build_inputs(state, *step)) for sequences, state, step in steps)


def kernel_agrees(module, seed):
    sequences, state, step = random_step(seed, "cpu")
    return matches(sequences, module.build_inputs(state, *step))


def test_the_kernel_makes_the_same(monkeypatch):
    module = interpreted_kernels("inputs_triton")
    # Several blocks for a sequence.
    monkeypatch.setattr(module, "BLOCK", 4)
    assert all(kernel_agrees(module, seed) for seed in range(KERNEL_CASES))


KERNEL_FAULTS = {
    "padding is written": ("tl.where(counts_in, page * page_size", "tl.where(is_own, page * page_size"),
    "drafts beyond the room": (", room - 1), 0)", ", room + 9), 0)"),
    "drafts within prompts": ("(context + runs == length) & ", ""),
    "drafts of the first sequence": ("draft_tokens + sequence * draft_stride", "draft_tokens"),
    "rows that produce begin early": ("start + asked - 1", "start + asked - 2"),
    "behind all is the last sequence": ("tl.full([], idle, tl.int64)", "tl.load(seats + batch - 1)"),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_faults_in_the_kernel_are_caught(fault, tmp_path):
    module = planted(interpreted_kernels("inputs_triton"), *KERNEL_FAULTS[fault], tmp_path)
    assert not all(kernel_agrees(module, seed) for seed in range(KERNEL_CASES))


def test_seats_of_nobody_and_of_ended_sequences_do_nothing():
    """Whatever the host still asks for."""
    sequence = Sequence(0, Request(np.arange(5, dtype=np.uint32)), 9)
    sequence.pages = [3, 5]
    state, _ = state_of([sequence, sequence, sequence], "cpu")
    state.rise(0)
    state.limits[1] = 5
    seats = torch.tensor([0, 1, state.idle, state.idle])
    drafts = padded_drafts([sequence] * 4, 3, "cpu", rng=np.random.default_rng(0))
    drafts, ones = drafts._replace(lengths=torch.full((4,), 3)), torch.ones(4, dtype=torch.int32)
    inputs = build_inputs(state, seats, ones, drafts, torch.arange(0, 17, 4, dtype=torch.int32), 18, PAGE_SIZE)
    for left in (inputs.tokens, inputs.positions, inputs.lengths, inputs.drafted.counts, inputs.drafted.scheduled):
        assert not left.any()
    assert (inputs.slots == SCRATCH).all()


def test_pages_are_appended_where_each_table_ends():
    state = DeviceState.empty(3, 20, 6, PAGES, torch.device("cpu"))
    state.add_pages([2, 0], [0, 0], [[7, 8], [1]])
    state.add_pages([0, 1, 2], [1, 0, 2], [[4, 5, 6], [], [9]])
    state.add_pages([1], [0], [[]])
    none = [PAGES] * 6
    expected = [[1, 4, 5, 6, *none[:2]], none, [7, 8, 9, *none[:3]], none]
    assert state.page_tables.tolist() == expected
    assert state.page_tables.dtype == torch.int32
