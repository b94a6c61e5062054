"""Updates of Muon are orthogonal and have the size of the matrix."""

import torch

from engine.training.muon import Muon, orthogonalize


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
