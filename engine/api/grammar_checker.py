"""Compile new grammars in another process before the engine does, because compiling some takes minutes or crashes.

Compiling cannot be interrupted, and the library's limits do not bound its time: a few dozen characters are enough for
minutes and gigabytes. Here each new grammar is compiled by a process of its own with a limit of processor time. The
engine compiles the grammar again, in about the same time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from engine.api.messages import RequestEnded, TokensProduced
from engine.api.outputs import Run
from engine.sampling.grammar import Grammar
from engine.sampling.grammar_state import GrammarCompiler
from engine.scheduling.request import Request
from ssd.errors import UserError

MAX_COMPILE_S = 0.2
"""Processor time in seconds that a grammar may take until its first mask, because the engine's steps wait for it."""
MAX_STACK = 4 << 20
"""Largest stack in bytes, half of the usual one, so that a grammar that passes cannot overflow the engine's stack."""
MAX_WAIT_S = 30.0
"""Time in seconds in which a check must end, the start of the process included; then the process is replaced."""
ENDED_BY_GRAMMAR = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT)
"""Exit statuses of compilers whose grammar is to blame. Others may have other causes, such as a lack of memory."""
MAX_RESULTS = 256
"""Number of results to keep."""


class GrammarChecker:
    """Checks grammars for one model. Starts its process for the first grammar. Use it from a single event loop."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        """compiler: one that has not compiled anything; the process has a copy of it."""
        self._compiler = compiler
        self._process: tuple[BaseProcess, Connection] | None = None
        self._results: dict[Grammar, str] = {}
        """Reasons why grammars cannot be used, empty for those that can; the oldest first."""
        self._thread = ThreadPoolExecutor(1, "grammar-checker")
        """Checks one grammar after another, and finishes a check whose request was cancelled."""

    async def run(self, run: Run, request: Request) -> AsyncGenerator[TokensProduced | RequestEnded, None]:
        """Yield the events of a request like `run`, after its grammar has been checked.

        Raises UserError for a grammar that cannot be used.
        """
        grammar = request.sampling.grammar
        if grammar is not None:
            reason = self._results.get(grammar)
            if reason is None:
                reason = await asyncio.get_running_loop().run_in_executor(self._thread, self._check, grammar)
            if reason:
                raise UserError(reason)
        async with aclosing(run(request)) as events:
            async for event in events:
                yield event

    def _check(self, grammar: Grammar) -> str:
        """Return the reason why a grammar cannot be used; runs in the thread."""
        if grammar in self._results:
            return self._results[grammar]
        answer = self._check_in_process(grammar) or self._check_in_process(grammar)
        if answer is None:
            return f"{grammar.kind}: the grammar could not be checked, because the checking process ended; try again"
        reason, is_final = answer
        if not is_final:
            return reason
        self._results[grammar] = reason
        if len(self._results) > MAX_RESULTS:
            del self._results[next(iter(self._results))]
        return reason

    def _check_in_process(self, grammar: Grammar) -> tuple[str, bool] | None:
        """Return the result of `refusal` in the process; None if it ended or was too late. The next call starts one."""
        try:
            if self._process is None:
                self._process = _start(self._compiler)
            connection = self._process[1]
            connection.send(grammar)
            if connection.poll(MAX_WAIT_S):
                answer: tuple[str, bool] = connection.recv()
                return answer
        except (EOFError, OSError):
            pass
        if self._process is not None:
            self._process[0].kill()
            self._process[1].close()
            self._process = None
        return None


def _start(compiler: GrammarCompiler) -> tuple[BaseProcess, Connection]:
    """Start the process that checks grammars, and return it with the connection to it. Raises OSError."""
    context = multiprocessing.get_context("spawn")
    own_end, other_end = context.Pipe()
    process = context.Process(target=_serve, args=(other_end, compiler), name="ssd-grammars", daemon=True)
    process.start()
    other_end.close()
    return process, own_end


def _serve(connection: Connection, compiler: GrammarCompiler) -> None:
    """Check grammars until the connection is closed; runs in the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group.
    compiler.prepare()
    with suppress(EOFError, OSError):
        while True:
            connection.send(refusal(compiler, connection.recv()))


def refusal(compiler: GrammarCompiler, grammar: Grammar) -> tuple[str, bool]:
    """Compile a grammar in a fork of this process.

    Returns the reason why it cannot be used, empty if it can, and whether another attempt would have the same result.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
            os.nice(10)  # The engine's steps take precedence.
            signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)  # Ends the process.
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
        return f"{grammar.kind}: it cannot be used: llguidance crashes; it may be nested too deep", True
    if status:
        return f"{grammar.kind}: the grammar could not be checked: compiling it ended with status {status}", False
    return reason, True


def _reason(compiler: GrammarCompiler, grammar: Grammar) -> str:
    try:
        compiler.start(grammar)
    except UserError as problem:
        return str(problem)
    return ""
