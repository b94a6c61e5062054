"""Compile new grammars in another process before the engine does, because compiling some takes minutes or crashes.

Compiling cannot be interrupted, and the library's limits do not bound its time: a few dozen characters are enough for
minutes and gigabytes. Here each new grammar is compiled in a fork that has limits of time, memory and stack. The engine
compiles the grammar again, in about the same time.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from weakref import WeakValueDictionary

from engine.sampling.grammar import Grammar
from engine.sampling.grammar_state import GrammarCompiler
from ssd.errors import UserError

MAX_COMPILE_S = 0.2
"""Processor time in seconds that a grammar may take until its first mask, because the engine's steps wait for it."""
QUICK_S = 0.02
"""The same for a first attempt. Grammars that take longer are compiled again within the limit above, at lower priority,
so that they delay others by this time only. Most take 1 to 15 ms in a fork."""
MAX_COMPILE_MIB = 256
"""Memory in MiB that compiling a grammar may take. Within the limit of time, 110 were the most."""
MAX_STACK = 4 << 20
"""Largest stack in bytes; at most half of the engine's, which a grammar that passes therefore cannot overflow."""
MAX_CHECKS = 4
"""Number of first attempts that run at once, and of second ones."""
MAX_WAIT_S = 30.0
"""Time in seconds in which an attempt must end, the start of the process included; then the process is replaced."""
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
        self._threads = {limit_s: ThreadPoolExecutor(MAX_CHECKS, "grammars") for limit_s in (QUICK_S, MAX_COMPILE_S)}
        """Threads that wait for the process, by limit of processor time."""

    async def check(self, grammar: Grammar) -> None:
        """Raise UserError for a grammar that cannot be used."""
        if reason := await self._result(grammar):
            raise UserError(reason)

    def close(self) -> None:
        """Wait for the running checks, and end the process."""
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)
        self._end_process()

    async def _result(self, grammar: Grammar) -> str:
        """Return the reason why a grammar cannot be used, empty if it can; check it if that is not known."""
        key = hashlib.sha256(repr(grammar).encode()).digest()
        # Of several requests, one checks. If it is cancelled, so is its check, unless it runs, and the next one checks.
        async with self._turns.setdefault(key, asyncio.Lock()):
            if key not in self._results:
                self._results[key] = await self._attempt(grammar)
                if len(self._results) > MAX_RESULTS:
                    self._results.popitem(last=False)
            self._results.move_to_end(key)
            return self._results[key]

    async def _attempt(self, grammar: Grammar) -> str:
        """Return the reason why a grammar cannot be used, empty if it can. Raises UserError if that remains unknown."""
        for limit_s, threads in self._threads.items():
            compiling = asyncio.get_running_loop().run_in_executor(threads, self._compile, grammar, limit_s)
            if (reason := await compiling) is not None:
                return reason
        return (
            f"{grammar.kind}: it cannot be compiled within the limits of {MAX_COMPILE_S:g} s of processor time, "
            f"{MAX_COMPILE_MIB} MiB of memory, and the stack; use smaller repetitions, fewer alternatives, fewer "
            "combined schemas, or less nesting"
        )

    def _compile(self, grammar: Grammar, limit_s: float) -> str | None:
        """Compile a grammar in a fork of the process.

        Returns the reason why it cannot be used, empty if it can, and None if the fork reached a limit. Raises
        UserError if that remains unknown.
        """
        used = None
        own_end, other_end = multiprocessing.Pipe()
        with own_end, suppress(EOFError, OSError):
            with other_end, self._lock:
                if self._process is None or not self._process[0].is_alive():
                    self._end_process()
                    self._process = _start(self._compiler)
                used = self._process
                socket.send_fds(used[1], [b"\0"], [other_end.fileno()])
            own_end.send((grammar, limit_s, MAX_COMPILE_MIB))
            has_begun = own_end.poll(MAX_WAIT_S) and own_end.recv()
            try:
                if has_begun and own_end.poll(MAX_WAIT_S):
                    return str(own_end.recv())
            except EOFError:
                return None
        with self._lock:
            # Other checks may have replaced the process. Those that run in its forks continue.
            if self._process is used:
                self._end_process()
        raise UserError(f"{grammar.kind}: the grammar could not be checked; try again")

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
    """Compile a grammar for each connection that `control` sends, until it is closed; runs in the process."""
    # Ctrl-C and other signals reach the whole process group; the HTTP process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    compiler.prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Forks that have ended are removed.
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            try:
                with Connection(descriptors[0]) as connection:
                    grammar, *limits = connection.recv()
                    connection.send(True)
                    _limit(*limits)
                    connection.send(_reason(compiler, grammar))
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _limit(processor_s: float, memory_mib: int) -> None:
    """Set the limits of this process: processor time, memory beyond what it has now, stack and priority."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = MAX_STACK if stack == resource.RLIM_INFINITY else min(MAX_STACK, stack // 2)
    for kind, limit in ((resource.RLIMIT_AS, used + (memory_mib << 20)), (resource.RLIMIT_STACK, stack)):
        _, largest = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if largest == resource.RLIM_INFINITY else min(limit, largest), largest))
    os.nice(5 if processor_s <= QUICK_S else 10)  # The engine's steps take precedence.
    # Either timer ends the process; the second one if it waits for something.
    signal.setitimer(signal.ITIMER_PROF, processor_s)
    signal.setitimer(signal.ITIMER_REAL, 2 * MAX_WAIT_S)


def _reason(compiler: GrammarCompiler, grammar: Grammar) -> str:
    try:
        compiler.start(grammar)
    except UserError as problem:
        return str(problem)
    return ""
