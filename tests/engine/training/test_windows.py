"""Windows have the target's hidden states, each without context."""

import torch

from engine.models.ops import PLAIN
from engine.training import windows as module
from engine.training.windows import read_windows
from tests.engine.forward import prompt_logits
from tests.engine.training.tiny import new_target, new_windows


def test_the_states_after_the_last_layer_give_the_logits_of_the_target(monkeypatch):
    monkeypatch.setattr(module, "BATCH_TOKENS", 48)  # two windows
    target, text = new_target(), new_windows(5)
    tokens, states = read_windows(target, text, (1, target.config.num_layers))
    assert tokens.tolist() == text.tolist()
    for row, window in enumerate(text):
        with torch.no_grad():
            logits = target.logits(target.norm.normalize_sum(states[row, :, 1], None, PLAIN)[1])
        torch.testing.assert_close(logits, prompt_logits(target, window))
