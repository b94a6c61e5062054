"""Compare verification on the device with that on the host, over several steps and on arbitrary rows."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.executor.device_state import DeviceState
from engine.executor.kernels import verify as verify_module
from engine.executor.kernels.inputs import build_inputs
from tests import naive
from tests.engine.executor.kernels.device_steps import (
    PAGE_SIZE,
    VOCAB,
    new_sequence,
    padded_drafts,
    random_entries,
    same_state,
    state_of,
)
from tests.engine.steps import batch_of
from tests.engine.tables import give_pages
from tests.naive import accepted_length


def commit_on_host(entries, target):
    """Commit a step as the eager executor and the engine do; return the tokens that each sequence produced."""
    produced, bounds = [], batch_of(entries, PAGE_SIZE).logit_offsets
    for entry, start in zip(entries, bounds.tolist(), strict=False):
        own = target[start : start + 1 + len(entry.draft)]
        accepted = accepted_length(entry.draft, own)
        entry.sequence.commit(own[: accepted + 1], accepted=np.zeros(accepted, np.uint8))
        produced.append(own[: accepted + 1].tolist())
    return produced


def steps_agree(verify, device, seed):
    """Whether a few steps on the device and on the host produce the same tokens and leave the same state."""
    rng = np.random.default_rng(seed)
    sequences = [new_sequence(rng) for _ in range(rng.integers(1, 6))]
    for index, sequence in enumerate(sequences):
        give_pages(sequence, range(index * 10, index * 10 + 10))
    state, slots = state_of(sequences, device)
    max_draft = int(rng.integers(0, 7))
    for _ in range(4):
        entries = random_entries(sequences, rng, max_draft)
        drafts = padded_drafts(entries, max_draft, device, rng=rng)
        # A batch is padded with idle slots.
        padded = torch.cat([slots, torch.full((2,), state.idle, device=slots.device)])
        drafts = type(drafts)(*(torch.cat([part, part[:1], part[:1]]) for part in drafts))
        widths = [1 + max_draft + int(rng.integers(2)) for _ in entries]
        starts = torch.tensor(np.cumsum([0, *widths, 0, 0]), dtype=torch.int32, device=device)
        inputs = build_inputs(state, padded, drafts, starts, sum(widths) + int(rng.integers(3)), PAGE_SIZE)
        target = rng.integers(0, VOCAB, len(inputs.tokens))
        bounds = zip(starts.tolist(), inputs.counts.tolist(), strict=False)
        of_host = np.concatenate([target[first : first + count] for first, count in bounds])
        verified = verify(state, padded, inputs, torch.from_numpy(target).to(device), max_draft + 1)
        produced = [*commit_on_host(entries, of_host.astype(np.uint32)), [], []]
        for index, tokens in enumerate(produced):
            padding = [0] * (max_draft + 1 - len(tokens))
            if verified.tokens[index].tolist() != tokens + padding:
                return False
        if verified.counts.tolist() != list(map(len, produced)):
            return False
        if not same_state(state, sequences, slots):
            return False
        sequences, slots = still_running(sequences, slots)
        if not sequences:
            break
    return all(not column[state.idle] for column in (state.lengths, state.last_tokens))


def still_running(sequences, slots):
    going = [index for index, sequence in enumerate(sequences) if sequence.room]
    return [sequences[index] for index in going], slots[going]


def test_steps_equal_those_of_the_host(implementation):
    check = implementation.of(verify_module.verify)
    assert all(steps_agree(check, implementation.device, seed) for seed in range(implementation.cases))


def random_rows(data):
    """Rows of some sequences, with unused rows between them: tokens, starts, counts, the target's tokens."""
    tokens, starts, counts = [9], [], []
    for _ in range(data.draw(st.integers(1, 4))):
        tokens += [9] * data.draw(st.integers(0, 2))
        count = data.draw(st.integers(0, 8))
        starts.append(len(tokens))
        counts.append(count)
        if count:
            tokens += [9, *data.draw(st.lists(st.integers(0, 1), min_size=count - 1, max_size=count - 1))]
    target = data.draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))
    return tokens, starts, counts, target


# The health check is safe to suppress: the fixture does not change between examples.
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ragged_rows_are_verified_like_the_naive_twin(implementation, data):
    tokens, starts, counts, target = random_rows(data)
    device, batch = implementation.device, len(starts)
    state = DeviceState.empty(batch, 20, 1, 0, device)
    integers = {"dtype": torch.int32, "device": device}
    inputs = SimpleNamespace(
        tokens=torch.tensor(tokens, device=device),
        starts=torch.tensor([*starts, len(tokens)], **integers),
        counts=torch.tensor(counts, **integers),
    )
    verified = implementation.of(verify_module.verify)(
        state, torch.arange(batch, device=device), inputs, torch.tensor(target, device=device), 8
    )
    assert all(part.dtype == torch.int32 for part in verified)
    for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
        draft = slice(start + 1, start + count)
        path = list(range(-1, count - 2))
        accepted = naive.accepted_path(tokens[draft], path, target[start : start + count]) if count else []
        produced = target[start : start + len(accepted) + 1] if count else []
        assert int(verified.counts[index]) == len(produced) == int(state.lengths[index])
        assert verified.tokens[index].tolist() == produced + [0] * (8 - len(produced))
        assert state.history[index].tolist() == produced + [0] * (20 - len(produced))
        assert int(state.last_tokens[index]) == (produced[-1] if produced else 0)
