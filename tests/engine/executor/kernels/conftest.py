"""Tests that run on every implementation of verification."""

import pytest

from tests.engine.executor.kernels.backends import BACKENDS


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=pytest.mark.gpu) if "gpu" in name else name for name in BACKENDS],
)
def backend(request):
    return BACKENDS[request.param]()
