"""Losses of heads: windows, chains and cross-entropy equal obvious twins. Steps of Muon are orthogonal."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from engine.models.heads.eagle import EagleHead
from engine.models.heads.eagle3 import Eagle3Head, Eagle3Style
from engine.models.heads.mtp import MtpHead
from engine.models.layers import PLAIN
from engine.training import objectives as module
from engine.training.objectives import TEMPERATURE, cross_entropy, read_windows, run_chains, run_window
from engine.training.run import Muon, orthogonalize
from tests.engine.forward import DenseAttention, prompt_logits
from tests.engine.training.tiny import CONFIG, new_target, new_windows

TOKENS, STEPS = 12, 4


def new_head(kind):
    one_layer = replace(CONFIG, num_layers=1)
    torch.manual_seed(1)
    if kind == "mtp":
        head = MtpHead(one_layer, CONFIG.num_layers)
    elif kind == "eagle":
        head = EagleHead(one_layer, CONFIG.num_layers)
    else:
        size = CONFIG.hidden_size
        head = Eagle3Head(one_layer, (1, 2, 3), Eagle3Style(), target_hidden_size=size, draft_vocab_size=30)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    head.attach(new_target().double())
    return head.double()  # heads without norms amplify rounding errors


def naive_chain(head, tokens, states, start, steps, *, shift=0):
    """Hidden states of one chain, a token at a time: rows 0 to `start` on the target's states, then `steps` more.

    shift: planted mistake, the distance by which the target's states are too early.
    """
    attend = DenseAttention()

    def run(row, state):
        return head(tokens[row + 1 : row + 2], state[None], torch.tensor([row + 1]), attend)

    for row in range(start + 1):
        output = run(row, states[max(0, row - shift)])
    outputs = [output.hidden[0]]
    for step in range(1, steps + 1):
        output = run(start + step, output.state[0])
        outputs.append(output.hidden[0])
    return torch.stack(outputs)


@pytest.fixture(params=["mtp", "eagle", "eagle3"])
def head(request):
    return new_head(request.param)


@torch.no_grad()
def unrolled(head, tokens, states):
    """Hidden states of the chains from every usable row: [B, steps + 1, C, hidden_size]."""
    first, window = run_window(head, tokens, states)
    usable = states.shape[1] - STEPS
    starts = torch.arange(usable).repeat(len(tokens), 1)
    outputs = [first.hidden[:, :usable]]
    outputs += [output.hidden for output in run_chains(head, tokens, first, window, starts, STEPS)]
    return torch.stack(outputs, dim=1)


def inputs():
    torch.manual_seed(2)
    return torch.randint(1, CONFIG.vocab_size, (2, TOKENS)), torch.randn(2, TOKENS - 1, CONFIG.hidden_size).double()


@torch.no_grad()
def test_chains_equal_drafting_token_by_token(head):
    tokens, states = inputs()
    together = unrolled(head, tokens, states)
    for row in range(2):
        for start in range(together.shape[2]):
            alone = naive_chain(head, tokens[row], states[row], start, STEPS)
            torch.testing.assert_close(together[row, :, start], alone, rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_shifted_hidden_states_are_noticed(head):
    tokens, states = inputs()
    together = unrolled(head, tokens, states)
    for start in range(1, together.shape[2]):
        wrong = naive_chain(head, tokens[0], states[0], start, STEPS, shift=1)
        assert not torch.allclose(together[0, :, start], wrong, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_chains_from_some_rows_equal_those_from_all(head):
    tokens, states = inputs()
    together = unrolled(head, tokens, states)
    first, window = run_window(head, tokens, states)
    starts = torch.tensor([[5, 0, 3], [2, 6, 1]])
    for step, output in enumerate(run_chains(head, tokens, first, window, starts, STEPS), 1):
        for row in range(2):
            torch.testing.assert_close(output.hidden[row], together[row, step, starts[row]], rtol=1e-6, atol=1e-8)


def test_loss_acceptance_and_gradient_equal_plain_pytorch(monkeypatch):
    monkeypatch.setattr(module, "PART_ROWS", 4)  # several parts, the last one smaller
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    weight = torch.randn(11, 8)
    labels = torch.randn(2, 5, 11).softmax(-1) * 0.9  # of a reduced vocabulary: they add up to less than 1
    scale = torch.rand(2, 5)
    losses, accepted = cross_entropy(hidden, weight, labels)
    (losses * scale).sum().backward()
    gradient = hidden.grad.clone()
    hidden.grad = None

    log_q = F.log_softmax(hidden @ weight.T / TEMPERATURE, dim=-1)
    expected = -(labels * log_q).sum(-1)
    (expected * scale).sum().backward()
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(accepted, torch.minimum(labels, log_q.exp()).sum(-1))
    torch.testing.assert_close(gradient, hidden.grad)


def test_the_states_after_the_last_layer_give_the_logits_of_the_target(monkeypatch):
    monkeypatch.setattr(module, "BATCH_TOKENS", 48)  # two windows
    target, text = new_target(), new_windows(5)
    tokens, states = read_windows(target, text, (1, target.config.num_layers))
    assert tokens.tolist() == text.tolist()
    for row, window in enumerate(text):
        with torch.no_grad():
            logits = target.logits(target.norm.normalize_sum(states[row, :, 1], None, PLAIN)[1])
        torch.testing.assert_close(logits, prompt_logits(target, window))


def test_singular_values_become_nearly_equal():
    torch.manual_seed(0)
    for shape in ((6, 10), (10, 6)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_a_step_is_relative_to_the_matrix():
    torch.manual_seed(0)
    changes = []
    gradient = torch.randn(6, 10)
    for size in (1.0, 100.0):
        matrix = torch.nn.Parameter(size * torch.eye(6, 10))
        before = matrix.detach().clone()
        matrix.grad = gradient.clone()
        Muon([matrix], lr=0.01).step()
        changes.append((matrix.detach() - before) / size)
    torch.testing.assert_close(changes[0], changes[1], rtol=1e-3, atol=1e-5)
    assert (changes[0] * gradient).sum() < 0, "steps go down"
