"""Operations of a step do not synchronize with a GPU, and leave tensors where they are."""

import numpy as np
import pytest
import torch

from engine.executor.device_state import DeviceState, PaddedDrafts
from engine.executor.kernels.inputs import build_inputs
from engine.executor.kernels.sample import replayed, sampled_tokens
from engine.executor.kernels.verify import verify
from tests.engine.executor.kernels.conftest import on

SLOTS, BATCH, DRAFT, PAGE_SIZE, VOCAB = 6, 4, 5, 16, 100


def arguments_of_a_step(device):
    """A state and the inputs of a step."""
    state = DeviceState(SLOTS, 64, 4, 9, torch.device(device))
    state.lengths.fill_(10)
    state.limits.fill_(40)
    state.temperatures.fill_(0.7)
    state.top_k.fill_(20)
    integers = {"dtype": torch.int32, "device": device}
    drafts = PaddedDrafts(torch.full((BATCH, DRAFT), 10, **integers), torch.full((BATCH,), DRAFT, **integers))
    logits = torch.zeros(BATCH * (DRAFT + 1), VOCAB, device=device)
    slots = torch.arange(BATCH, device=device)
    starts = torch.arange(BATCH + 1, **integers) * (DRAFT + 1)
    return state, drafts, slots, starts, logits


def step(state, drafts, slots, starts, logits):
    """Run steps, truncated or not."""
    for max_ranked in (None, 0, 30):
        inputs = build_inputs(state, slots, drafts, starts, len(logits), PAGE_SIZE)
        tokens = sampled_tokens(state, inputs, logits, samples=True, max_ranked=max_ranked)
        verified = verify(state, slots, inputs, replayed(state, inputs, tokens), DRAFT + 1)
    return inputs, verified


@pytest.mark.gpu
def test_no_step_synchronizes_with_a_gpu():
    arguments = arguments_of_a_step(on("cuda"))
    step(*arguments)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*arguments)
        arguments[0].add_pages(np.array([[0, 1, 2], [1, 2, 3]]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_state_is_changed_in_place():
    """CUDA graphs hold the addresses of its tensors."""
    arguments = arguments_of_a_step("cpu")
    state = arguments[0]
    tensors = [each for each in vars(state).values() if isinstance(each, torch.Tensor)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    inputs, verified = step(*arguments)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    wide = (inputs.tokens, inputs.positions, inputs.cache_slots, inputs.request_slots)
    assert all(tensor.dtype == torch.int64 for tensor in wide)
    narrow = (inputs.contexts, inputs.counts, inputs.starts, *verified)
    assert all(tensor.dtype == torch.int32 for tensor in narrow)
