"""Grammars are checked in a process of their own; what takes long or crashes there does not reach the engine."""

import asyncio
import json
import os
import resource
import signal
import threading
from contextlib import closing, nullcontext
from types import SimpleNamespace

import pytest

from engine.api import grammar_checker as module
from engine.api import service as service_module
from engine.api.errors import ApiError
from engine.api.grammar_checker import GrammarChecker
from engine.api.messages import EngineReady
from engine.api.service import Service
from engine.config import ContextWindow
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.sampling.grammar import Grammar, choice_grammar
from engine.sampling.grammar_state import GrammarCompiler
from ssd.errors import UserError

pytestmark = pytest.mark.anyio
DIGITS = Grammar("regex", "[0-9]{3}")


LIMITS = "it cannot be compiled within the limits of 0.2 s of processor time"


def chain(length):
    """Schema of references that each contain the next, which the library follows by recursion."""
    definitions = {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(length)}
    return json.dumps({"$ref": "#/$defs/0", "$defs": definitions | {str(length): {}}})


@pytest.fixture
def checker():
    with closing(new_checker()) as checker:
        yield checker


@pytest.fixture(scope="module")
def shared():
    """A checker whose process no test ends or limits."""
    with closing(new_checker()) as checker:
        yield checker


def new_checker():
    return GrammarChecker(GrammarCompiler(Tokenizer(SHIPPED_MODEL), 4096, (0,)))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "("), "it cannot be used: .*unclosed group"),
        (Grammar("regex", "\ud800"), "it cannot be used: .*surrogates not allowed"),
        (Grammar("regex", r"\w*" * 5_000), LIMITS),
        (Grammar("json_schema", '{"type": "integer", "multipleOf": 123456789}'), LIMITS),
        (Grammar("json_schema", chain(2_500)), LIMITS),
    ],
    ids=["invalid", "surrogate", "many expressions", "multiple", "stack overflow"],
)
async def test_refused_grammars_do_not_end_the_process(shared, grammar, message):
    await shared.check(DIGITS)
    process, _ = shared._process
    with pytest.raises(UserError, match=f"^{grammar.kind}: {message}"):
        await shared.check(grammar)
    await shared.check(choice_grammar([repr(grammar)[:80]]))  # Another one each time, because results are kept.
    assert shared._process[0] is process


async def test_grammars_that_need_much_memory_are_refused(shared, monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPILE_MIB", 1)
    with pytest.raises(UserError, match=f"choice: {LIMITS}, 1 MiB of memory, and the stack; use"):
        await shared.check(choice_grammar([f"{number} {number**2}" for number in range(5_000)]))
    monkeypatch.undo()
    await shared.check(Grammar("json_schema", chain(300)))


async def test_the_process_starts_for_the_first_grammar_and_survives_signals_and_small_stacks(checker):
    assert checker._process is None
    await checker.check(DIGITS)
    first, _ = checker._process
    os.kill(first.pid, signal.SIGTERM)
    os.kill(first.pid, signal.SIGINT)
    resource.prlimit(first.pid, resource.RLIMIT_STACK, (1 << 20, 1 << 20))
    await checker.check(Grammar("regex", "a"))
    assert checker._process[0] is first
    first.kill()
    first.join()
    await checker.check(Grammar("regex", "b"))
    second, _ = checker._process
    checker.close()
    assert not second.is_alive()


@pytest.mark.parametrize("is_ended", [False, True], ids=["too late", "ended"])
async def test_a_check_without_an_answer_is_an_error_and_is_not_kept(checker, monkeypatch, is_ended):
    def start(compiler):
        process, control = original(compiler)
        if is_ended:
            process.kill()
        return process, control

    original = module._start
    monkeypatch.setattr(module, "_start", start)
    monkeypatch.setattr(module, "MAX_WAIT_S", 30.0 if is_ended else 0.0)
    with pytest.raises(UserError, match="regex: the grammar could not be checked; try again"):
        await checker.check(DIGITS)
    monkeypatch.undo()
    await checker.check(DIGITS)


async def test_grammars_that_take_long_do_not_delay_others(monkeypatch):
    monkeypatch.setattr(module, "QUICK_S", 0.06)  # Enough for `DIGITS` on slow machines.
    monkeypatch.setattr(module, "MAX_CHECKS", 2)
    with closing(new_checker()) as checker:
        slow = [Grammar("json_schema", json.dumps({"multipleOf": 123456789 + number})) for number in range(4)]
        refused = [asyncio.create_task(checker.check(grammar)) for grammar in slow]
        await asyncio.sleep(0)  # They begin before the other.
        await checker.check(DIGITS)
        assert not any(task.done() for task in refused[-module.MAX_CHECKS :])
        for task in refused:
            with pytest.raises(UserError, match=LIMITS):
                await task


class Counting(GrammarChecker):
    """A checker that does not compile, but keeps a list of attempts, each of which waits until `may_end` is set."""

    def __init__(self, *answers):
        """answers: those of the first and of the second attempt; None if it reaches the limit."""
        super().__init__(None)
        self.checked, self._answers = [], answers
        self.may_end = threading.Event()
        self.may_end.set()

    def _compile(self, grammar, limit_s):
        self.checked.append(grammar.text)
        self.may_end.wait()
        return self._answers[limit_s == module.MAX_COMPILE_S]


@pytest.mark.parametrize("reason", ["", "it cannot be used"])
async def test_the_results_of_recently_used_grammars_are_kept(monkeypatch, reason):
    monkeypatch.setattr(module, "MAX_RESULTS", 2)
    with closing(Counting(reason)) as checker:
        for text in "abacab":
            with pytest.raises(UserError, match=reason) if reason else nullcontext():
                await checker.check(Grammar("regex", text))
        assert checker.checked == ["a", "b", "c", "b"]


@pytest.mark.parametrize("answer", ["", None], ids=["usable", "too slow"])
async def test_grammars_that_are_slow_get_a_second_attempt(answer):
    with closing(Counting(None, answer)) as checker:
        for _ in range(2):
            with nullcontext() if answer == "" else pytest.raises(UserError, match=LIMITS):
                await checker.check(DIGITS)
        assert checker.checked == 2 * [DIGITS.text]


async def test_a_grammar_is_checked_once_for_all_requests():
    with closing(Counting("")) as checker:
        await asyncio.gather(*(checker.check(DIGITS) for _ in range(3)))
        assert checker.checked == [DIGITS.text]


async def test_checks_of_cancelled_requests_do_not_delay_others(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHECKS", 1)
    with closing(Counting("")) as checker:
        checker.may_end.clear()
        running, dropped, same, other = (
            asyncio.create_task(checker.check(Grammar("regex", text))) for text in ("a", "b", "a", "c")
        )
        await asyncio.sleep(0)
        for task in (running, dropped):
            task.cancel()
        await asyncio.gather(running, dropped, return_exceptions=True)
        checker.may_end.set()
        await asyncio.gather(same, other)
        assert "b" not in checker.checked


async def test_requests_whose_grammar_is_checked_count_as_open(monkeypatch):
    with closing(Counting("")) as checker:
        checker.may_end.clear()
        monkeypatch.setattr(service_module, "GrammarChecker", lambda _: checker)
        served = SimpleNamespace(name="m", tokenizer=Tokenizer(SHIPPED_MODEL))
        ready = EngineReady(4096, ContextWindow(1024, 1024), (0,))
        service = Service(SimpleNamespace(open_requests=1), ready, served, 3)
        service.admit(2)
        task = asyncio.create_task(service.check_grammar(DIGITS, 2))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="the server has 3 requests"):
            service.admit(1)
        checker.may_end.set()
        await task
        service.admit(2)
