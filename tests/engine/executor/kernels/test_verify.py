"""Verification on the device, against the host's: over steps that follow one another, and on any rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.executor.batch import build_batch
from engine.executor.device_state import DeviceState
from engine.executor.eager import kept_rows
from engine.executor.kernels import verify_torch
from engine.executor.kernels.drafted import Drafted
from engine.executor.kernels.inputs import build_inputs
from engine.sampling.sampler import Chosen
from engine.scheduling.plan import SequencePlan, SequenceResult
from tests import naive
from tests.engine.executor.kernels.backends import Backend, planted, triton_module
from tests.engine.executor.kernels.hosted import (
    PAGE_SIZE,
    VOCAB,
    give_drafts,
    new_sequence,
    padded_drafts,
    same_state,
    state_of,
)


def commit_on_host(sequences, chosen):
    """What each produces, as the eager executor and the engine do it."""
    entries = [
        SequencePlan(each, each.computed, each.scheduled, each.produces, draft=each.draft, tree=each.tree)
        for each in sequences
    ]
    batch = build_batch(entries, PAGE_SIZE)
    produced = []
    for index, (entry, rows) in enumerate(zip(entries, kept_rows(batch, Chosen(chosen, {}), entries), strict=True)):
        sequence = entry.sequence
        sequence.computed += sequence.scheduled - sequence.produces
        if len(rows) == 0:
            produced.append([])
            continue
        start = batch.logit_offsets[index]
        tokens = chosen[start + rows]
        sequence.commit(SequenceResult(entry, tokens, rows[1:] - 1))
        produced.append(tokens.tolist())
    return produced


def steps_agree(backend, seed):
    """Whether a few steps on the device and on the host produce, move and leave the same."""
    rng = np.random.default_rng(seed)
    sequences = [new_sequence(rng) for _ in range(rng.integers(1, 6))]
    for index, sequence in enumerate(sequences):
        sequence.pages = list(range(index * 10, index * 10 + 10))
    state, seats = state_of(sequences, backend.device)
    most = int(rng.integers(0, 7))
    for _ in range(4):
        give_drafts(sequences, rng, most)
        scheduled = [sequence.scheduled for sequence in sequences]
        drafts = padded_drafts(sequences, most, backend.device, rng=rng)
        # A batch is filled up with seats of nobody.
        filled = torch.cat([seats, torch.full((2,), state.idle, device=seats.device)])
        drafts = type(drafts)(*(torch.cat([part, part[:1], part[:1]]) for part in drafts))
        asked = torch.tensor([*scheduled, 1, 1], dtype=torch.int32, device=backend.device)
        widths = [count + most + int(rng.integers(2)) for count in scheduled]
        starts = torch.tensor(np.cumsum([0, *widths, 0, 0]), dtype=torch.int32, device=backend.device)
        inputs = build_inputs(state, filled, asked, drafts, starts, sum(widths) + int(rng.integers(3)), PAGE_SIZE)
        firsts, counts = inputs.drafted.starts.tolist(), inputs.drafted.counts.tolist()
        chosen = rng.integers(0, VOCAB, len(inputs.tokens))
        of_host = np.concatenate([chosen[first:][:count] for first, count in zip(firsts, counts, strict=True)])
        verified = backend.verify(state, inputs.drafted, torch.from_numpy(chosen).to(backend.device), most + 1)
        produced = commit_on_host(sequences, of_host.astype(np.uint32))
        produced += [[], []]
        for index, tokens in enumerate(produced):
            padding = [0] * (most + 1 - len(tokens))
            if verified.tokens[index].tolist() != tokens + padding:
                return False
        if verified.counts.tolist() != list(map(len, produced)):
            return False
        if not same_state(state, sequences, seats):
            return False
        sequences, seats = still_running(sequences, seats)
        if not sequences:
            break
    return all(not column[state.idle] for column in (state.lengths, state.computed, state.last_tokens))


def still_running(sequences, seats):
    going = [index for index, sequence in enumerate(sequences) if sequence.room]
    return [sequences[index] for index in going], seats[going]


def test_steps_are_those_of_the_host(backend):
    for seed in range(backend.cases):
        assert steps_agree(backend, seed)


def random_rows(data):
    """Rows of some sequences, with rows of nobody between them: tokens, starts, counts, the target's choices."""
    tokens, starts, counts = [9], [], []
    for _ in range(data.draw(st.integers(1, 4))):
        tokens += [9] * data.draw(st.integers(0, 2))
        count = data.draw(st.integers(0, 8))
        starts.append(len(tokens))
        counts.append(count)
        if count:
            tokens += [9, *data.draw(st.lists(st.integers(0, 1), min_size=count - 1, max_size=count - 1))]
    chosen = data.draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))
    return tokens, starts, counts, chosen


@settings(max_examples=30)
@given(data=st.data())
def test_ragged_rows_are_verified_as_by_the_slow_twin(backend, data):
    tokens, starts, counts, chosen = random_rows(data)
    device, batch = backend.device, len(starts)
    state = DeviceState.empty(batch, 20, 1, 0, device)
    integers = {"dtype": torch.int32, "device": device}
    drafted = Drafted(
        tokens=torch.tensor(tokens, device=device),
        starts=torch.tensor(starts, **integers),
        counts=torch.tensor(counts, **integers),
        scheduled=torch.ones(batch, **integers),
        seats=torch.arange(batch, device=device),
    )
    verified = backend.verify(state, drafted, torch.tensor(chosen, device=device), 8)
    assert all(part.dtype == torch.int32 for part in verified)
    for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
        draft = slice(start + 1, start + count)
        path = list(range(-1, count - 2))
        accepted = naive.accepted_path(tokens[draft], path, chosen[start : start + count]) if count else []
        produced = chosen[start : start + len(accepted) + 1] if count else []
        assert int(verified.counts[index]) == len(produced) == int(state.lengths[index])
        assert verified.tokens[index].tolist() == produced + [0] * (8 - len(produced))
        assert state.history[index].tolist() == produced + [0] * (20 - len(produced))
        assert int(state.last_tokens[index]) == (produced[-1] if produced else 0)
        assert int(state.computed[index]) == 1 + len(accepted)


TORCH_FAULTS = {
    "agrees with its own row": ("tokens[:, 1:] == own[:, :-1]", "tokens[:, 1:] == own[:, 1:]"),
    "keeps what follows a wrong token": ("agrees.cumprod(dim=1)", "agrees.int()"),
    "rows of others": ("value=True) & exist", "value=True)"),
    "computed without accepted": ("drafted.scheduled + accepted.int()", "drafted.scheduled"),
    "computed counts the bonus token": ("drafted.scheduled + accepted.int()", "drafted.scheduled + counts.int()"),
    "history overwritten": ("lengths[:, None] + column, 0", "lengths[:, None] + column - 1, 0"),
    "last token of the draft": ("produced.gather(1, accepted", "tokens.int().gather(1, accepted"),
}

KERNEL_FAULTS = {
    "agrees with its own row": ("chosen + start + row - 1,", "chosen + start + row,"),
    "rows of others": ("tl.minimum(first_wrong, count)", "first_wrong"),
    "bonus of the first row": ("chosen + start + produced - 1", "chosen + start"),
    "computed without accepted": ("tl.load(scheduled + sequence) + accepted", "tl.load(scheduled + sequence)"),
    "history overwritten": ("seat * history_stride + length + row", "seat * history_stride + length - 1 + row"),
    "rest not cleared": ("own, mask=row < width)", "own, mask=row < produced)"),
}


@pytest.mark.parametrize("fault", TORCH_FAULTS)
def test_planted_faults_are_caught(fault, tmp_path):
    assert caught(Backend(planted(verify_torch, *TORCH_FAULTS[fault], tmp_path)))


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_planted_faults_of_kernels_are_caught(fault, tmp_path):
    module = planted(triton_module(), *KERNEL_FAULTS[fault], tmp_path)
    assert caught(Backend(module, "cuda" if torch.cuda.is_available() else "cpu"))


def caught(backend):
    try:
        return not all(steps_agree(backend, seed) for seed in range(60))
    except (RuntimeError, IndexError):
        return True
