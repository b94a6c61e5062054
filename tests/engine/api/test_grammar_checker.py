"""Grammars are checked in a process of their own; what takes long or crashes there does not reach the engine."""

import asyncio
import json
import os
import resource
import signal
import threading
from contextlib import aclosing, closing, nullcontext

import pytest

from engine.api import grammar_checker as module
from engine.api.grammar_checker import GrammarChecker
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.sampling.grammar import Grammar, choice_grammar
from engine.sampling.grammar_state import GrammarCompiler
from engine.scheduling.request import Request, SamplingParams
from ssd.errors import UserError
from tests.strategies import array

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


def new_checker():
    return GrammarChecker(GrammarCompiler(Tokenizer(SHIPPED_MODEL), 4096, (0,)))


async def run(request):
    """In place of the engine: an event for each request."""
    yield request.sampling.grammar


async def events(checker, grammar):
    request = Request(array([1]), SamplingParams(grammar=grammar))
    async with aclosing(checker.run(run, request)) as received:
        return [event async for event in received]


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
async def test_refused_grammars_do_not_end_the_process(checker, grammar, message):
    assert await events(checker, DIGITS) == [DIGITS]
    process, _ = checker._process
    with pytest.raises(UserError, match=f"^{grammar.kind}: {message}"):
        await events(checker, grammar)
    assert await events(checker, Grammar("json_schema", chain(300)))
    assert checker._process[0] is process


async def test_grammars_that_need_much_memory_are_refused(checker, monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPILE_MIB", 1)
    with pytest.raises(UserError, match=f"choice: {LIMITS}, 1 MiB of memory, and the stack; use"):
        await events(checker, choice_grammar([f"{number} {number**2}" for number in range(5_000)]))
    assert await events(checker, DIGITS) == [DIGITS]


async def test_the_process_starts_for_the_first_grammar_and_after_its_end(checker):
    assert await events(checker, None) == [None]
    assert checker._process is None
    assert await events(checker, DIGITS) == [DIGITS]
    first, _ = checker._process
    first.kill()
    first.join()
    assert await events(checker, Grammar("regex", "a")) == [Grammar("regex", "a")]
    second, _ = checker._process
    checker.close()
    assert not second.is_alive()


async def test_signals_to_the_group_and_small_stacks_do_not_matter(checker):
    await events(checker, DIGITS)
    process, _ = checker._process
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    resource.prlimit(process.pid, resource.RLIMIT_STACK, (1 << 20, 1 << 20))
    await events(checker, Grammar("regex", "a"))
    assert checker._process[0] is process


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
        await events(checker, DIGITS)
    monkeypatch.undo()
    assert await events(checker, DIGITS) == [DIGITS]


async def test_grammars_that_take_long_do_not_delay_others(monkeypatch):
    monkeypatch.setattr(module, "QUICK_S", 0.06)  # Enough for `DIGITS` on slow machines.
    with closing(new_checker()) as checker:
        slow = [Grammar("json_schema", json.dumps({"multipleOf": 123456789 + number})) for number in range(16)]
        refused = [asyncio.create_task(events(checker, grammar)) for grammar in slow]
        await asyncio.sleep(0)  # They begin before the other.
        assert await events(checker, DIGITS) == [DIGITS]
        assert not any(task.done() for task in refused[-module.MAX_CHECKS :])
        for task in refused:
            with pytest.raises(UserError, match=LIMITS):
                await task


class Counting(GrammarChecker):
    """A checker whose process is replaced by a list of the grammars that it would compile."""

    def __init__(self, answer):
        super().__init__(None)
        self.checked, self._answer = [], answer

    def _compile(self, grammar, limit_s):
        self.checked.append(grammar.text)
        return self._answer


@pytest.mark.parametrize("reason", ["", "it cannot be used"])
async def test_the_results_of_recently_used_grammars_are_kept(monkeypatch, reason):
    monkeypatch.setattr(module, "MAX_RESULTS", 2)
    with closing(Counting(reason)) as checker:
        for text in "abacab":
            with pytest.raises(UserError, match=reason) if reason else nullcontext():
                await events(checker, Grammar("regex", text))
        assert checker.checked == ["a", "b", "c", "b"]


class Slow(Counting):
    """A checker of grammars that reach the limit of the first attempt."""

    def _compile(self, grammar, limit_s):
        answer = super()._compile(grammar, limit_s)
        return None if limit_s < module.MAX_COMPILE_S else answer


@pytest.mark.parametrize("answer", ["", None], ids=["usable", "too slow"])
async def test_grammars_that_are_slow_get_a_second_attempt(answer):
    with closing(Slow(answer)) as checker:
        for _ in range(2):
            with nullcontext() if answer == "" else pytest.raises(UserError, match=LIMITS):
                assert await events(checker, DIGITS) == [DIGITS]
        assert checker.checked == 2 * [DIGITS.text]


async def test_a_grammar_is_checked_once_for_all_requests():
    with closing(Counting("")) as checker:
        assert await asyncio.gather(*(events(checker, DIGITS) for _ in range(3))) == 3 * [[DIGITS]]
        assert checker.checked == [DIGITS.text]


class Waiting(Counting):
    """A checker whose checks wait until `may_end` is set."""

    def __init__(self):
        super().__init__("")
        self.may_end = threading.Event()

    def _compile(self, grammar, limit_s):
        answer = super()._compile(grammar, limit_s)
        self.may_end.wait()
        return answer


async def test_checks_of_cancelled_requests_do_not_delay_others(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHECKS", 1)
    with closing(Waiting()) as checker:
        running, dropped, same, other = (
            asyncio.create_task(events(checker, Grammar("regex", text))) for text in ("a", "b", "a", "c")
        )
        await asyncio.sleep(0)
        for task in (running, dropped):
            task.cancel()
        await asyncio.gather(running, dropped, return_exceptions=True)
        checker.may_end.set()
        assert await same == [Grammar("regex", "a")]
        assert await other == [Grammar("regex", "c")]
        assert "b" not in checker.checked
