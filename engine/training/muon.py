"""Muon in float32.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). `torch.optim.Muon` multiplies in
bfloat16, which processors without instructions for it do 25 times more slowly than float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.775, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum with Nesterov's look-ahead, for matrices that have been trained before.

    Learning rates are relative to the singular values that a matrix begins with: their root mean square is the unit.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: nn.Parameter, lr: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            state["unit"] = parameter.norm() / min(parameter.shape) ** 0.5
        momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        parameter.sub_(lr * state["unit"] * orthogonalize(gradient.lerp(momentum, MOMENTUM)))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix [R, C] with the singular vectors of `matrix` and singular values of 0.7 to 1.2."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
