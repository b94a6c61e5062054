"""Settings and fixtures for all tests. Hypothesis examples are deterministic and have no deadline."""

import os
import tempfile
from collections import Counter

import pytest
import torch
from hypothesis import settings

from tests.servers import served

# One PyTorch thread, here and in processes that tests start: on a busy machine waiting threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter. Triton reads this when it is imported, which transformers may do as well.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("project", derandomize=True, deadline=None, max_examples=200)
settings.register_profile("fast", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("fuzz", deadline=None, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))


@pytest.fixture
def socket_address():
    """Yield the address of a Unix socket with a short path: the kernel limits socket paths to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        yield f"unix:{folder}/drafter.sock"


@pytest.fixture
def server(socket_address):
    """Yield a running sidecar at `socket_address`."""
    with served("--listen", socket_address, "--capacity", "100k") as process:
        yield process


def pytest_collection_modifyitems(items):
    """Skip tests that need a GPU if there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # slow to import, and most tests do not need it

    if not torch.cuda.is_available():
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
