"""Settings and fixtures for all tests. Examples are deterministic, and without a deadline since machines are shared."""

import os
import tempfile

import pytest
from hypothesis import settings

from tests.servers import served

# Of PyTorch, here and in processes that tests start: on a busy machine threads that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("project", derandomize=True, deadline=None, max_examples=200)
settings.register_profile("soak", deadline=None, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))


@pytest.fixture
def socket_address():
    """An address in a folder of its own; its path is short, as Unix sockets need."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        yield f"unix:{folder}/drafter.sock"


@pytest.fixture
def server(socket_address):
    """A running sidecar at `socket_address`."""
    with served("--listen", socket_address, "--capacity", "100k", "--refresh-interval", "0.01") as process:
        yield process


def pytest_collection_modifyitems(items):
    """Tests that need a GPU are skipped where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # most tests do without it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
