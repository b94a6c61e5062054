"""Hidden states that the decoder returns for drafters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from engine.models.ops import PLAIN, Ops
from tests.engine.conftest import VOCAB


class OverwritingOps(Ops):
    """Plain operations that reuse their inputs' memory, as the fused kernels do."""

    def add_norm(self, residual, change, weight, eps):
        if change is None:
            return residual, F.rms_norm(residual, weight.shape, weight, eps)
        residual += change
        change.copy_(F.rms_norm(residual, weight.shape, weight, eps))
        return residual, change


def attend_causally(layer, query, key, value):
    heads = (part.transpose(0, 1) for part in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(0, 1)


@pytest.fixture
def tokens():
    return torch.arange(1, 30) * 7 % VOCAB


@pytest.mark.parametrize("ops", [PLAIN, OverwritingOps()], ids=["plain", "overwriting"])
@torch.inference_mode()
def test_hidden_states_are_those_of_transformers(model, model_folder, tokens, ops):
    reference = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    expected = reference(tokens[None], output_hidden_states=True).hidden_states
    outputs = []
    reference.model.layers[-1].register_forward_hook(lambda _, __, output: outputs.append(output))
    reference(tokens[None])
    before_norm = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    normed, states = model.hidden_states(tokens, torch.arange(len(tokens)), attend_causally, ops, layers=(2, 0, 1))
    for index, state in enumerate((before_norm, expected[0], expected[1])):
        torch.testing.assert_close(states[:, index], state[0] if state.ndim == 3 else state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed, expected[-1][0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_asking_for_hidden_states_changes_no_output(model, tokens):
    positions = torch.arange(len(tokens))
    plain = model(tokens, positions, attend_causally)
    normed, states = model.hidden_states(tokens, positions, attend_causally, layers=range(3))
    assert torch.equal(normed, plain)
    assert states.shape == (len(tokens), 3, model.config.hidden_size)
    assert model.hidden_states(tokens, positions, attend_causally)[1].shape == (len(tokens), 0, 64)


@pytest.mark.parametrize("layer", [-1, 3])
def test_layers_that_do_not_exist_are_refused(model, tokens, layer):
    with pytest.raises(ValueError, match="after layers 0 to 2"):
        model.hidden_states(tokens, torch.arange(len(tokens)), attend_causally, layers=(1, layer))
