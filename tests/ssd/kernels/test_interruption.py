"""Ctrl-C while a kernel is compiled ends the compilation, also where the exception would be dropped."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from ssd.kernels.interruption import interruptible

SCRIPT = """
import signal
from numba.core import codegen

dropped = []
compiled = codegen.JITCodeLibrary._object_compiled_hook.__func__

def interrupted_hook(library_class, module, buffer):
    "LLVM calls this."
    if not dropped:
        dropped.append(True)
        signal.raise_signal(signal.SIGINT)
    compiled(library_class, module, buffer)

codegen.JITCodeLibrary._object_compiled_hook = classmethod(interrupted_hook)
from ssd.kernels.jit import Int, kernel

def twice(number):
    return 2 * number

try:
    kernel(Int, returns=Int)(twice)
finally:
    print(dropped)
"""


@pytest.fixture(autouse=True)
def own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_an_interruption_while_llvm_calls_back_is_raised(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "[True]\n"
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("\nKeyboardInterrupt\n")
    assert "kernel(Int, returns=Int)(twice)" in done.stderr
    assert "numba" not in done.stderr
    assert done.returncode == -signal.SIGINT


def test_a_dropped_interruption_is_raised_again():
    def compile_for(seconds):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
        pytest.fail("the interruption was lost")

    with pytest.raises(KeyboardInterrupt), interruptible():
        compile_for(seconds=30)
