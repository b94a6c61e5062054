"""A fixture with the implementations of an operation."""

import pytest

from tests.engine.executor.kernels.implementations import IMPLEMENTATIONS, on, require_interpreter


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
