"""Implementations of operations: PyTorch reference, interpreted kernel, kernel on a GPU; and a fixture with them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class Implementation:
    name: str
    device: str
    cases: int
    """Number of random cases; few where the interpreter is slow."""

    def of(self, operation):
        """This implementation of an `Operation`."""
        return {"reference": operation.torch, "interpreted": operation.triton}.get(self.name, operation)


REFERENCE = Implementation("reference", "cpu", 100)
INTERPRETED = Implementation("interpreted", "cpu", 15)
GPU = Implementation("gpu", "cuda", 100)
IMPLEMENTATIONS = (REFERENCE, INTERPRETED, GPU)


def require_interpreter():
    """Skip the test if kernels cannot be interpreted on the CPU here."""
    pytest.importorskip("triton", reason="needs Triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted only on machines without a CUDA device")


def on(device):
    """Return the device; skip the test if it is missing."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return device


@pytest.fixture(
    params=[
        pytest.param(one, marks=[pytest.mark.gpu] if one.device == "cuda" else [], id=one.name)
        for one in IMPLEMENTATIONS
    ]
)
def implementation(request):
    on(request.param.device)
    if request.param.name == "interpreted":
        require_interpreter()
    return request.param
