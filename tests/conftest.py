"""Settings and fixtures for all tests. Hypothesis examples are deterministic and have no deadline."""

import os
import tempfile
from collections import Counter

import pytest
from hypothesis import settings

from tests.servers import served, serving

LONGEST = (
    "tests/drafter_service/replication/test_sidecars.py",
    "tests/engine/api/test_server.py",
    "tests/engine/drafters/test_sampled_outputs.py",
    "tests/benchmarks/test_host_time.py",
    "tests/engine/executor/ranks/test_divided_models.py",
    "tests/test_examples.py",
    "tests/test_wheel.py",
)
"""Files that take longest. They begin first, so that at the end no worker waits for another one's long file."""
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of the drivers for GPUs that PyTorch may use."""


def has_gpu():
    """Return whether PyTorch has a GPU. It is imported only if there may be one, since that takes seconds.

    With SSD_HAS_GPU=1 there is one, whatever its driver is.
    """
    if os.environ.get("SSD_HAS_GPU") == "1":
        return True
    if not any(map(os.path.exists, DRIVERS)):
        return False
    import torch

    return torch.cuda.is_available()


# One PyTorch thread, here and in processes that tests start: on a busy machine waiting threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not has_gpu():
    # Kernels run in Triton's interpreter. Triton reads this when it is imported, which transformers may do as well.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("project", derandomize=True, deadline=None, max_examples=200)  # in CI
settings.register_profile("half", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("fast", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("fuzz", deadline=None, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "half"))


@pytest.fixture
def socket_address():
    """Yield the address of a Unix socket with a short path: the kernel limits socket paths to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        yield f"unix:{folder}/drafter.sock"


@pytest.fixture
def server_process(socket_address):
    """Run a sidecar at `socket_address`, in a process: vLLM fails if numba is imported in its own before it starts."""
    with served("--listen", socket_address, "--capacity", "100k"):
        yield


@pytest.fixture
def server(socket_address):
    """Run a sidecar at `socket_address`, in a thread."""
    from ssd.config import DrafterConfig

    with serving(listen=socket_address, drafting=DrafterConfig(capacity=100_000)):
        yield


def pytest_collection_modifyitems(items):
    """Begin with the longest files, and skip tests that need a GPU if there is none."""
    items.sort(key=lambda item: item.location[0] not in LONGEST)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter):
    """List skipped tests by reason, most frequent first."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section("skipped tests by reason")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason}")
