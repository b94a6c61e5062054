"""Verification on the device equals a naive twin, on arbitrary rows."""

from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.executor.device_state import DeviceState
from engine.executor.kernels import verify as verify_module
from tests import naive


def random_rows(data):
    """Rows of some sequences, with unused rows between them: tokens, starts, counts, the target's tokens.

    Sequences without rows may be idle slots, of which a batch may have several.
    """
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
    state = DeviceState(batch, 20, 1, 0, device)
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch))
    state.lengths[:batch] = torch.tensor(lengths, device=device)
    slots = [index if count else state.idle for index, count in enumerate(counts)]
    integers = {"dtype": torch.int32, "device": device}
    inputs = SimpleNamespace(
        tokens=torch.tensor(tokens, device=device),
        starts=torch.tensor([*starts, len(tokens)], **integers),
        counts=torch.tensor(counts, **integers),
    )
    verified = implementation.of(verify_module.verify)(
        state, torch.tensor(slots, device=device), inputs, torch.tensor(target, device=device), 8
    )
    assert all(part.dtype == torch.int32 for part in verified)
    for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
        draft = slice(start + 1, start + count)
        path = list(range(-1, count - 2))
        accepted = naive.accepted_path(tokens[draft], path, target[start : start + count]) if count else []
        produced = target[start : start + len(accepted) + 1] if count else []
        assert int(verified.counts[index]) == len(produced)
        length = lengths[index]
        assert int(state.lengths[index]) == length + len(produced)
        assert verified.tokens[index].tolist() == produced + [0] * (8 - len(produced))
        assert state.history[index].tolist() == [0] * length + produced + [0] * (20 - length - len(produced))
        assert int(state.last_tokens[index]) == (produced[-1] if produced else 0)
    assert not state.lengths[state.idle]
    assert not state.last_tokens[state.idle]
