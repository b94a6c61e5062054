"""Ctrl-C while kernels are compiled.

LLVM calls functions of llvmlite, which cannot pass an exception on: a KeyboardInterrupt raised there is printed and
dropped, and compiling continues or fails with another error. After a long call of LLVM such a function is often the
first Python code that runs, so this is where the interruption arrives. Methods `__del__` drop exceptions, too.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

RETRY_S = 0.05
"""Seconds after which an interruption is raised again."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Return a context in which Ctrl-C raises KeyboardInterrupt at once, and without the frames of the compiler.

    Has no effect where Ctrl-C has another handler than Python's, and outside of the main thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    retries: list[threading.Timer] = []

    def interrupt(_number: int, frame: FrameType | None) -> None:
        retries.append(threading.Timer(RETRY_S, _thread.interrupt_main))
        retries[-1].start()
        if not _drops_exceptions(frame):
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            yield
        finally:
            for retry in retries:
                retry.cancel()
                retry.join()
    finally:
        signal.signal(signal.SIGINT, handler)
        if retries:
            raise KeyboardInterrupt from None


def _drops_exceptions(frame: FrameType | None) -> bool:
    """Return whether a frame belongs to a call from LLVM (see `llvmlite.binding.executionengine`) or a `__del__`."""
    while frame is not None:
        if frame.f_code.co_name.startswith(("_raw_object_cache", "__del__")):
            return True
        frame = frame.f_back
    return False
