"""Nothing of a step looks at a value: it runs on tensors without any, and on a GPU without a synchronisation."""

from dataclasses import fields

import pytest
import torch

from engine.executor.device_state import DeviceState
from engine.executor.kernels import verify
from engine.executor.kernels.drafted import Drafts
from engine.executor.kernels.inputs import build_inputs
from engine.executor.kernels.sample import replayed, sampled_tokens

SEATS, BATCH, DRAFT, PAGE_SIZE, VOCAB = 6, 4, 5, 16, 100


def materials(device):
    """A state and what the host sends for a step."""
    state = DeviceState.empty(SEATS, 64, 4, 9, torch.device(device))
    state.lengths.fill_(10)
    state.computed.fill_(9)
    state.limits.fill_(40)
    state.temperatures.fill_(0.7)
    state.top_k.fill_(20)
    integers = {"dtype": torch.int32, "device": device}
    drafts = Drafts(torch.zeros(BATCH, DRAFT, **integers), torch.full((BATCH,), DRAFT, **integers))
    odds = torch.full((BATCH * (DRAFT + 1), VOCAB), 1 / VOCAB, device=device)
    seats = torch.arange(BATCH, device=device)
    starts = torch.arange(BATCH + 1, **integers) * (DRAFT + 1)
    return state, drafts, seats, torch.ones(BATCH, **integers), starts, odds


def step(state, drafts, seats, scheduled, starts, odds, look=lambda tensor: tensor):
    """Steps, truncated or not."""
    for most in (None, 0, 30):
        inputs = build_inputs(state, seats, look(scheduled), drafts, starts, len(odds), PAGE_SIZE)
        chosen = sampled_tokens(state, inputs, odds.log(), draws=True, most=most)
        chosen = replayed(state, inputs, chosen)
        verified = verify.verify(state, inputs.drafted, chosen, DRAFT + 1)
    return inputs, verified


def test_no_value_is_looked_at():
    step(*materials("meta"))


@pytest.mark.parametrize(
    "look", [lambda t: t * int(t[0]), lambda t: t[t > 0], lambda t: t.to("cpu"), lambda t: t + bool(t.any())]
)
def test_looking_is_caught(look):
    with pytest.raises((RuntimeError, NotImplementedError)):
        step(*materials("meta"), look=look)


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    given = materials("cuda")
    step(*given)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*given)
        given[0].add_pages([0, 1], [0, 0], [[1, 2], [3]])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_state_stays_where_it_is():
    """CUDA graphs hold the addresses of its tensors."""
    given = materials("cpu")
    tensors = [getattr(given[0], field.name) for field in fields(given[0]) if field.name != "scratch_page"]
    addresses = [tensor.data_ptr() for tensor in tensors]
    inputs, verified = step(*given)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert all(tensor.dtype == torch.int64 for tensor in (inputs.tokens, inputs.positions, inputs.slots, inputs.seats))
    drafted = inputs.drafted
    counts = (inputs.lengths, inputs.contexts, drafted.counts, drafted.starts, drafted.scheduled, *verified)
    assert all(tensor.dtype == torch.int32 for tensor in counts)
