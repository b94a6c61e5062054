"""Grammars are checked in a process of their own; what takes long or crashes there does not reach the engine."""

import json
import os
import re
import signal
from contextlib import aclosing

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


async def run(request):
    """In place of the engine: an event for each request."""
    yield request.sampling.grammar


async def events(checker, grammar):
    request = Request(array([1]), SamplingParams(grammar=grammar))
    async with aclosing(checker.run(run, request)) as received:
        return [event async for event in received]


async def test_the_process_starts_for_the_first_grammar_and_after_its_end():
    checker = GrammarChecker(GrammarCompiler(Tokenizer(SHIPPED_MODEL), 4096, (0,)))
    assert await events(checker, None) == [None]
    assert checker._process is None
    assert await events(checker, DIGITS) == [DIGITS]
    first, connection = checker._process
    with pytest.raises(UserError, match="json_schema: it cannot be used: llguidance crashes"):
        await events(checker, Grammar("json_schema", chain(2_500)))
    with pytest.raises(UserError, match="unclosed group"):
        await events(checker, Grammar("regex", "("))
    connection.send(None)  # Not a grammar, so that the process fails.
    assert await events(checker, Grammar("regex", "a")) == [Grammar("regex", "a")]
    assert checker._process[0] is not first


async def test_a_process_that_does_not_answer_is_replaced(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.0)
    checker = GrammarChecker(GrammarCompiler(Tokenizer(SHIPPED_MODEL), 4096, (0,)))
    with pytest.raises(UserError, match="regex: the grammar could not be checked"):
        await events(checker, DIGITS)
    assert checker._process is None
    monkeypatch.undo()
    assert await events(checker, DIGITS) == [DIGITS]


def test_a_result_that_may_have_another_cause_is_not_final(compiler, monkeypatch):
    monkeypatch.setattr(module, "_reason", lambda _compiler, _grammar: os.kill(os.getpid(), signal.SIGKILL))
    reason, is_final = refusal(compiler, DIGITS)
    assert reason == "regex: the grammar could not be checked: compiling it ended with status -9"
    assert not is_final


async def test_a_bounded_number_of_results_is_kept(monkeypatch):
    checker = GrammarChecker(GrammarCompiler(Tokenizer(SHIPPED_MODEL), 4096, (0,)))
    monkeypatch.setattr(module, "MAX_RESULTS", 2)
    for text in "abc":
        await events(checker, Grammar("regex", text))
    assert [grammar.text for grammar in checker._results] == ["b", "c"]
