"""The installed vLLM 0.33 with an embedded drafter."""

import pytest

from tests.drafter_service.plugins.helpers import use_equal_steps
from tests.drafter_service.plugins.vllm.host import import_vllm


@pytest.fixture
def vllm(monkeypatch):
    """Import vLLM, and let it use the V2 model runner; skip the test where it is not installed."""
    import_vllm()
    monkeypatch.setenv("SSD_PLUGIN", '{"sidecar": "embedded", "capacity": 20000}')
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    for module in ("scheduler", "worker_drafts"):
        use_equal_steps(monkeypatch, f"vllm.{module}")
