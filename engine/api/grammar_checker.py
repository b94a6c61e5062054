"""Compile new grammars in another process before the engine does, because compiling some takes minutes or crashes.

Compiling cannot be interrupted, and the library's limits do not bound its time: a few dozen characters are enough for
minutes and gigabytes. Here each new grammar is compiled by a process of its own with a limit of processor time. The
engine compiles the grammar again, in about the same time.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import resource
import signal
import socket
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from weakref import WeakValueDictionary

from engine.api.messages import OutputEvent
from engine.api.outputs import Run
from engine.sampling.grammar import Grammar
from engine.sampling.grammar_state import GrammarCompiler
from engine.scheduling.request import Request
from ssd.errors import UserError

MAX_COMPILE_S = 0.2
"""Processor time in seconds that a grammar may take until its first mask, because the engine's steps wait for it."""
MAX_STACK = 4 << 20
"""Largest stack in bytes; at most half of the engine's, which a grammar that passes therefore cannot overflow."""
MAX_CHECKS = 16
"""Number of checks that run at once, so that grammars that take long delay others little. Those take 20 to 70 MB each,
and the longest ones up to 0.3 GB."""
MAX_WAIT_S = 30.0
"""Time in seconds in which a check must end, the start of the process included; then the process is replaced."""
ENDED_BY_GRAMMAR = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT)
"""Exit statuses of compilers whose grammar is to blame. Others may have other causes, such as a lack of memory."""
MAX_RESULTS = 1024
"""Number of results to keep, of 1 to 2 KB each."""


class GrammarChecker:
    """Checks grammars for one model. Starts its process for the first grammar. Use it from a single event loop."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        """compiler: one that has not compiled anything; the process has a copy of it."""
        self._compiler = compiler
        self._process: tuple[BaseProcess, socket.socket] | None = None
        self._lock = threading.Lock()
        """Held to start, use or end the process."""
        self._results: OrderedDict[bytes, str] = OrderedDict()
        """Reasons why grammars cannot be used, empty for those that can, by digest; the most recently used last."""
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Locks of the requests that need the same result, by digest."""
        self._threads = ThreadPoolExecutor(MAX_CHECKS, "grammar-checker")

    async def run(self, run: Run, request: Request) -> AsyncGenerator[OutputEvent, None]:
        """Yield the events of a request like `run`, after its grammar has been checked.

        Raises UserError for a grammar that cannot be used.
        """
        grammar = request.sampling.grammar
        if grammar is not None and (reason := await self._result(grammar)):
            raise UserError(reason)
        async with aclosing(run(request)) as events:
            async for event in events:
                yield event

    def close(self) -> None:
        """Wait for the running checks, and end the process."""
        self._threads.shutdown(cancel_futures=True)
        self._end_process()

    async def _result(self, grammar: Grammar) -> str:
        """Return the reason why a grammar cannot be used, empty if it can; check it if that is not known."""
        key = hashlib.sha256(repr(grammar).encode()).digest()
        # Of several requests, one checks. If it is cancelled, so is its check, unless it runs, and the next one checks.
        async with self._turns.setdefault(key, asyncio.Lock()):
            if key not in self._results:
                reason, is_final = await self._check(grammar)
                if not is_final:
                    return reason
                self._results[key] = reason
                if len(self._results) > MAX_RESULTS:
                    self._results.popitem(last=False)
            self._results.move_to_end(key)
            return self._results[key]

    async def _check(self, grammar: Grammar) -> tuple[str, bool]:
        """Return the result of `refusal` in the process; try it again once in a new process."""
        check = partial(asyncio.get_running_loop().run_in_executor, self._threads, self._check_in_process, grammar)
        ended = f"{grammar.kind}: the grammar could not be checked, because the checking process ended; try again"
        return await check() or await check() or (ended, False)

    def _check_in_process(self, grammar: Grammar) -> tuple[str, bool] | None:
        """Return the result of `refusal` in the process; None if it ended or was too late. Runs in a thread."""
        used = None
        own_end, other_end = multiprocessing.Pipe()
        with own_end, suppress(EOFError, OSError):
            with other_end, self._lock:
                if self._process is None:
                    self._process = _start(self._compiler)
                used = self._process
                socket.send_fds(used[1], [b"\0"], [other_end.fileno()])
            own_end.send(grammar)
            if own_end.poll(MAX_WAIT_S):
                answer: tuple[str, bool] = own_end.recv()
                return answer
        with self._lock:
            # Other checks may have replaced the process. Those that run in its forks continue.
            if self._process is used:
                self._end_process()
        return None

    def _end_process(self) -> None:
        if self._process is not None:
            self._process[0].kill()
            self._process[0].join()
            self._process[1].close()
            self._process = None


def _start(compiler: GrammarCompiler) -> tuple[BaseProcess, socket.socket]:
    """Start the process that checks grammars, and return it with a socket for `_serve`. Raises OSError."""
    context = multiprocessing.get_context("spawn")
    own_end, other_end = socket.socketpair()
    with other_end:
        process = context.Process(target=_serve, args=(other_end, compiler), name="ssd-grammars")
        process.start()
    return process, own_end


def _serve(control: socket.socket, compiler: GrammarCompiler) -> None:
    """Check a grammar for each connection that `control` sends, until it is closed; runs in the process."""
    # Ctrl-C and other signals reach the whole process group; the HTTP process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Processes that have ended are removed.
    compiler.prepare()
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with Connection(descriptors[0]) as connection:
                    connection.send(refusal(compiler, connection.recv()))
            finally:
                os._exit(0)
        os.close(descriptors[0])


def refusal(compiler: GrammarCompiler, grammar: Grammar) -> tuple[str, bool]:
    """Compile a grammar in a fork of this process.

    Returns the reason why it cannot be used, empty if it can, and whether another attempt would have the same result.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            limit, largest = resource.getrlimit(resource.RLIMIT_STACK)
            stack = MAX_STACK if limit == resource.RLIM_INFINITY else min(MAX_STACK, limit // 2)
            resource.setrlimit(resource.RLIMIT_STACK, (stack, largest))
            os.nice(10)  # The engine's steps take precedence.
            # Either timer ends the process; the second one if it waits for something.
            signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)
            signal.setitimer(signal.ITIMER_REAL, MAX_WAIT_S)
            os.write(writing, _reason(compiler, grammar).encode(errors="backslashreplace"))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as results:
        reason = results.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGPROF:
        return (
            f"{grammar.kind}: it takes more than {MAX_COMPILE_S:g} s of processor time to compile, which is the limit; "
            "use smaller repetitions, fewer alternatives, or fewer schemas that are combined"
        ), True
    if status in ENDED_BY_GRAMMAR:
        return f"{grammar.kind}: it cannot be used: llguidance crashes; it may be nested too deeply", True
    if status:
        return f"{grammar.kind}: the grammar could not be checked: compiling it ended with status {status}", False
    return reason, True


def _reason(compiler: GrammarCompiler, grammar: Grammar) -> str:
    try:
        compiler.start(grammar)
    except UserError as problem:
        return str(problem)
    return ""
