"""The loss without stored logits equals the plain one, with its gradient."""

import torch
import torch.nn.functional as F

from engine.training import cross_entropy as module
from engine.training.cross_entropy import TEMPERATURE, cross_entropy


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
