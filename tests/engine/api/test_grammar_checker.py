"""Grammars are checked in a process of their own; what takes long or crashes there does not reach the engine."""

import asyncio
import json
import os
import re
import resource
import signal
import threading
from contextlib import aclosing, closing, nullcontext

import pytest

from engine.api import grammar_checker as module
from engine.api.grammar_checker import GrammarChecker, refusal
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.sampling.grammar import Grammar
from engine.sampling.grammar_state import GrammarCompiler
from engine.scheduling.request import Request, SamplingParams
from ssd.errors import UserError
from tests.strategies import array

pytestmark = pytest.mark.anyio
DIGITS = Grammar("regex", "[0-9]{3}")


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(Tokenizer(SHIPPED_MODEL), 4096, (0,))
    compiler.prepare()
    return compiler


def chain(length):
    """Schema of references that each contain the next, which the library follows by recursion."""
    definitions = {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(length)}
    return json.dumps({"$ref": "#/$defs/0", "$defs": definitions | {str(length): {}}})


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (DIGITS, ""),
        (Grammar("json_schema", chain(300)), ""),
        (Grammar("regex", "("), "regex: it cannot be used: .*unclosed group"),
        (Grammar("regex", "\ud800"), "regex: it cannot be used: .*surrogates not allowed"),
        (Grammar("regex", r"\w*" * 5_000), "regex: it takes more than 0.2 s of processor time to compile"),
        (Grammar("json_schema", '{"type": "integer", "multipleOf": 123456789}'), "json_schema: it takes more than"),
    ],
    ids=["digits", "references", "invalid", "surrogate", "many expressions", "multiple"],
)
def test_reasons_of_refusals(compiler, grammar, message):
    reason, is_final = refusal(compiler, grammar)
    assert re.fullmatch(f"{message}.*" if message else "", reason)
    assert is_final


@pytest.fixture
def checker():
    with closing(GrammarChecker(GrammarCompiler(Tokenizer(SHIPPED_MODEL), 4096, (0,)))) as checker:
        yield checker


async def run(request):
    """In place of the engine: an event for each request."""
    yield request.sampling.grammar


async def events(checker, grammar):
    request = Request(array([1]), SamplingParams(grammar=grammar))
    async with aclosing(checker.run(run, request)) as received:
        return [event async for event in received]


async def test_the_process_starts_for_the_first_grammar_and_after_its_end(checker):
    assert await events(checker, None) == [None]
    assert checker._process is None
    assert await events(checker, DIGITS) == [DIGITS]
    first, _ = checker._process
    with pytest.raises(UserError, match="json_schema: it cannot be used: llguidance crashes"):
        await events(checker, Grammar("json_schema", chain(2_500)))
    with pytest.raises(UserError, match="unclosed group"):
        await events(checker, Grammar("regex", "("))
    assert checker._process[0] is first
    first.kill()
    assert await events(checker, Grammar("regex", "a")) == [Grammar("regex", "a")]
    second, _ = checker._process
    checker.close()
    assert not first.is_alive()
    assert not second.is_alive()


async def test_signals_to_the_group_and_small_stacks_do_not_matter(checker):
    await events(checker, DIGITS)
    process, _ = checker._process
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    resource.prlimit(process.pid, resource.RLIMIT_STACK, (1 << 20, 1 << 20))
    await events(checker, Grammar("regex", "a"))
    assert checker._process[0] is process


async def test_a_process_that_does_not_answer_is_replaced(checker, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.0)
    with pytest.raises(UserError, match="regex: the grammar could not be checked"):
        await events(checker, DIGITS)
    assert checker._process is None
    monkeypatch.undo()
    assert await events(checker, DIGITS) == [DIGITS]


async def test_grammars_that_take_long_do_not_delay_others(checker):
    slow = [Grammar("json_schema", json.dumps({"multipleOf": 123456789 + number})) for number in range(3)]
    refused = [asyncio.create_task(events(checker, grammar)) for grammar in slow]
    await asyncio.sleep(0)  # They begin before the other.
    assert await events(checker, DIGITS) == [DIGITS]
    assert not any(task.done() for task in refused)
    for task in refused:
        with pytest.raises(UserError, match="it takes more than"):
            await task


def test_a_compiler_that_waits_is_ended(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.05)
    monkeypatch.setattr(module, "_reason", lambda _compiler, _grammar: signal.pause())
    reason, is_final = refusal(compiler, DIGITS)
    assert reason == "regex: the grammar could not be checked: compiling it ended with status -14"
    assert not is_final


def test_a_result_that_may_have_another_cause_is_not_final(compiler, monkeypatch):
    monkeypatch.setattr(module, "_reason", lambda _compiler, _grammar: os.kill(os.getpid(), signal.SIGKILL))
    reason, is_final = refusal(compiler, DIGITS)
    assert reason == "regex: the grammar could not be checked: compiling it ended with status -9"
    assert not is_final


class Counting(GrammarChecker):
    """A checker whose process is replaced by a list of the grammars that it would check."""

    def __init__(self, answer):
        super().__init__(None)
        self.checked, self._answer = [], answer

    def _check_in_process(self, grammar):
        self.checked.append(grammar.text)
        return self._answer


@pytest.mark.parametrize("reason", ["", "it cannot be used"])
async def test_the_results_of_recently_used_grammars_are_kept(monkeypatch, reason):
    monkeypatch.setattr(module, "MAX_RESULTS", 2)
    with closing(Counting((reason, True))) as checker:
        for text in "abacab":
            with pytest.raises(UserError, match=reason) if reason else nullcontext():
                await events(checker, Grammar("regex", text))
        assert checker.checked == ["a", "b", "c", "b"]


async def test_results_that_are_not_final_are_not_kept():
    for answer, attempts in ((("out of memory", False), 1), (None, 2)):
        with closing(Counting(answer)) as checker:
            for _ in range(2):
                with pytest.raises(UserError):
                    await events(checker, DIGITS)
            assert len(checker.checked) == 2 * attempts


async def test_a_grammar_is_checked_once_for_all_requests():
    with closing(Counting(("", True))) as checker:
        assert await asyncio.gather(*(events(checker, DIGITS) for _ in range(3))) == 3 * [[DIGITS]]
        assert checker.checked == [DIGITS.text]


class Waiting(Counting):
    """A checker whose checks wait until `may_end` is set."""

    def __init__(self):
        super().__init__(("", True))
        self.may_end = threading.Event()

    def _check_in_process(self, grammar):
        answer = super()._check_in_process(grammar)
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
