"""Ctrl-C while a kernel is compiled ends the compilation, also where the exception would be dropped."""

import os
import signal
import subprocess
import sys
import threading
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


def test_a_dropped_interruption_is_raised_again_without_the_error_that_follows_it():
    def compile_badly():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("no compiled object yet")

    def compile_for(seconds):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
        pytest.fail("the interruption was lost")

    for compile_it in (compile_badly, lambda: compile_for(seconds=30)):
        with pytest.raises(KeyboardInterrupt) as raised, interruptible():
            compile_it()
        assert raised.value.__suppress_context__


def test_an_interruption_within_a_finalizer_is_raised_after_it():
    class Module:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)
            finished.append(True)

    finished = []
    with pytest.raises(KeyboardInterrupt), interruptible():
        Module()
    assert finished == [True]


def test_nothing_follows_a_compilation_without_an_interruption():
    with interruptible():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with pytest.raises(ZeroDivisionError), interruptible():
        raise ZeroDivisionError


def test_other_handlers_and_threads_are_left_alone():
    received, handlers = [], []
    signal.signal(signal.SIGINT, lambda *_: received.append(True))
    with interruptible():
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert received == [True]

    def compile_it():
        with interruptible():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
