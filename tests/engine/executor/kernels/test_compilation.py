"""Kernels compile for a GPU, without one. The interpreter accepts code that the compiler does not."""

import os
import subprocess
import sys

import pytest


def test_kernels_compile_for_a_gpu(tmp_path):
    pytest.importorskip("triton", reason="needs Triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.executor.kernels.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
