"""Kernels compile for a GPU, here or not: being interpreted forgives what a compiler does not."""

import os
import subprocess
import sys

import pytest


def test_kernels_compile_for_a_gpu():
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.executor.kernels.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
