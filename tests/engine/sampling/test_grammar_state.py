"""The state of a grammar along drafts, compared with a state that starts again for each row."""

import json
import math
import re
import sys
from collections import OrderedDict
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.tokenizer import Tokenizer
from engine.sampling import grammar_state as module
from engine.sampling.grammar import Grammar, choice_grammar
from engine.sampling.grammar_state import GrammarCompiler, GrammarError
from engine.scheduling.request import Request, SamplingParams
from engine.speculation.draft_tree import DraftTree
from ssd.errors import UserError
from tests.engine.conftest import VOCAB
from tests.engine.trees import random_tree
from tests.strategies import array

END = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "left": {"type": "string", "maxLength": 5},
        "class": {"enum": ["Pair", "Part"]},
        "pass": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 3},
    },
    "required": ["left", "class", "pass"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "(return|right) [a-z]{2,4}(;\n)?"),
    choice_grammar(["return", "right", "left, left"]),
]


@pytest.fixture(scope="module")
def compiler(model_folder):
    return GrammarCompiler(Tokenizer(model_folder), VOCAB, (END,))


def state_after(compiler, grammar, tokens):
    """Slow twin: the state after tokens, from the beginning."""
    state = compiler.start(grammar)
    assert all(state.accept(token) for token in tokens)
    return state


def naive_forced(compiler, grammar, tokens):
    """Slow twin of `forced`: while one token is allowed, it follows."""
    forced = []
    while END not in forced:
        allowed = np.flatnonzero(state_after(compiler, grammar, tokens + forced).allowed())
        if len(allowed) != 1:
            break
        forced.append(int(allowed[0]))
    return forced


def walk(compiler, grammar, rng):
    """A random output, and what was forced at each position."""
    tokens, state = [], compiler.start(grammar)
    while END not in tokens:
        assert state.forced() == naive_forced(compiler, grammar, tokens)
        tokens.append(int(rng.choice(np.flatnonzero(state.allowed()))))
        assert state.accept(tokens[-1])
    assert not state.accept(END)
    return tokens[:-1]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("seed", range(3))
def test_forced_tokens_are_those_without_an_alternative(compiler, model_folder, grammar, seed):
    tokens = walk(compiler, grammar, np.random.default_rng(seed))
    text = Tokenizer(model_folder).decode(array(tokens))
    if grammar.kind == "json_schema":
        value = json.loads(text)
        assert list(value) == list(SCHEMA["properties"])
        assert (value["class"] in ("Pair", "Part"), len(value["pass"]) <= 3) == (True, True)
    elif grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text)
    else:
        assert text in json.loads(grammar.text)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("shape", ["path", "tree"])
def test_rows_are_masked_as_if_the_draft_were_committed(compiler, grammar, shape):
    rng = np.random.default_rng(5)
    right = walk(compiler, grammar, rng)
    for start in range(0, len(right), 3):
        tokens, parents = random_tree(rng, right[start:], 8, VOCAB)
        if shape == "path":
            parents = list(range(-1, len(tokens) - 1))
        tree = None if shape == "path" else DraftTree(np.array(parents, np.int32))
        state = state_after(compiler, grammar, right[:start])
        needed = rng.random(len(tokens) + 1) < 0.8
        found, errors = state.allowed_along(array(tokens), tree, needed)
        assert not errors
        rows = iter(found)
        for row in np.flatnonzero(needed).tolist():
            path, node = [], row - 1
            while node >= 0:
                path.insert(0, tokens[node])
                node = parents[node]
            twin = compiler.start(grammar)
            is_allowed = all(twin.accept(token) for token in right[:start] + path)
            np.testing.assert_array_equal(next(rows), twin.allowed() if is_allowed else np.ones(VOCAB, bool))
        assert state.forced() == naive_forced(compiler, grammar, right[:start]), "the state itself has changed"


def test_grammars_that_cannot_be_used_are_refused_in_one_line(compiler, model_folder):
    for grammar in (Grammar("regex", "("), Grammar("json_schema", '{"type": 5}'), Grammar("json_schema", "[")):
        with pytest.raises(UserError, match=f"{grammar.kind}: it cannot be used: [^\n]*$"):
            compiler.start(grammar)
    with pytest.raises(UserError, match="needs a model with an end token"):
        GrammarCompiler(Tokenizer(model_folder), VOCAB, ()).start(GRAMMARS[0])
    with pytest.raises(UserError, match="regex: it has 140,000 characters; at most 131,072 are allowed"):
        Grammar("regex", "a" * 140_000)


NUMBERS = st.one_of(st.integers(-2, 300), st.floats(allow_nan=True), st.sampled_from([10**400, 1e300, 5e-324, 2**64]))
PATTERNS = st.text("a(){}[]^|*+?.,19\\\\xpu:é", max_size=20)
SCHEMAS = st.recursive(
    st.one_of(
        st.sampled_from(
            [True, None, {}, {"$ref": "#"}, {"$ref": "#/anyOf/0"}, {"type": "string"}, {"type": ["null", 1]}]
        ),
        st.builds(lambda name, value: {name: value}, st.sampled_from(["minItems", "minimum"]), NUMBERS),
        # Other values take long to compile.
        st.sampled_from([-2, 0, 0.5, 7, 300, 2**64, 10**400, 1e300, 5e-324, math.inf, math.nan]).map(
            lambda value: {"multipleOf": value}
        ),
        st.builds(lambda pattern: {"pattern": pattern, "type": "string"}, PATTERNS),
        st.builds(lambda value: {"enum": [value, "a"]}, NUMBERS),
    ),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["items", "additionalProperties", "minItems", "$ref", "not"]), inner),
        st.dictionaries(st.sampled_from(["anyOf", "allOf", "oneOf", "prefixItems"]), st.lists(inner, max_size=3)),
        st.builds(lambda value, least: {"items": value, "minItems": least}, inner, NUMBERS),
        st.builds(lambda value, name: {"properties": {name: value}, "required": [name]}, inner, st.text(max_size=3)),
        st.builds(lambda value, name: {"patternProperties": {name: value}}, inner, PATTERNS),
    ),
    max_leaves=12,
)


@given(
    st.one_of(
        SCHEMAS.map(lambda schema: Grammar("json_schema", json.dumps(schema))), PATTERNS.map(partial(Grammar, "regex"))
    )
)
def test_any_grammar_is_compiled_or_refused(compiler, grammar):
    with suppress(UserError):
        compiler.start(grammar).allowed()


def test_other_errors_refuse_the_grammar(model_folder, monkeypatch, caplog):
    compiler = GrammarCompiler(Tokenizer(model_folder), VOCAB, (END,))

    def fail(grammar):
        raise OverflowError("too large")

    monkeypatch.setattr(module, "definition", fail)
    with pytest.raises(UserError, match="regex: it cannot be used: OverflowError: too large"):
        compiler.start(GRAMMARS[1])
    assert "OverflowError" in caplog.text


def test_masks_that_take_long_end_the_output(compiler, monkeypatch):
    """The clock makes each mask take 15 ms, 5 ms more than it may."""
    times = iter(range(110))
    monkeypatch.setattr(module, "thread_time", lambda: 0.015 * next(times))
    state = compiler.start(GRAMMARS[1])
    draft, needed = array([]), np.ones(1, bool)
    for _ in range(49):
        _, errors = state.allowed_along(draft, None, needed)
        assert not errors
    state.allowed_along(draft, None, needed)
    _, errors = state.allowed_along(draft, None, needed)
    assert list(errors) == [0]
    assert "regex: the output cannot be continued, because finding the allowed tokens takes too long" in str(errors[0])


def test_without_the_library_requests_are_told_what_to_install(model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"choice needs the library llguidance on the .* pip install '\.\[grammar\]'"):
        GrammarCompiler(Tokenizer(model_folder), VOCAB, (END,)).start(GRAMMARS[2])


def test_kept_grammars_are_bounded_by_the_time_that_they_took(model_folder, monkeypatch):
    compiler = GrammarCompiler(Tokenizer(model_folder), VOCAB, (END,))
    first = compiler.start(GRAMMARS[2])
    kept = compiler._kept[GRAMMARS[2]]
    assert kept.spent_s > 0
    before = kept.spent_s
    first.allowed_along(np.array([], np.uint32), None, np.array([True]))
    assert kept.spent_s > before
    monkeypatch.setattr(module, "thread_time", iter(range(100)).__next__)  # Each grammar takes a second.
    monkeypatch.setattr(module, "MAX_KEPT_S", 2.5)
    grammars = [choice_grammar([text]) for text in "abc"]
    for grammar in (*grammars[:2], grammars[0], grammars[2]):
        compiler.start(grammar)
    assert list(compiler._kept) == [grammars[0], grammars[2]]
    assert first.allowed().any()


def test_settings_that_contradict_a_grammar_are_refused(model):
    with pytest.raises(UserError, match="ignore_eos: it cannot be combined with regex"):
        SamplingParams(grammar=GRAMMARS[1], ignore_eos=True)
    request = Request(array([1]), SamplingParams(grammar=GRAMMARS[1]), recorded=array([1]))
    with pytest.raises(UserError, match="regex: a request with a recorded output"):
        request.check(model.config)


def test_a_limit_that_other_states_reached_does_not_end_an_output(compiler, monkeypatch):
    """With few states allowed, the shared automaton reaches its limit again and again."""
    grammar = GRAMMARS[0]
    expected = walk(compiler, grammar, np.random.default_rng(7))
    monkeypatch.setattr(module, "MAX_STATES", 95)
    monkeypatch.setattr(compiler, "_kept", OrderedDict())
    renewed = []
    original = GrammarCompiler.renew
    monkeypatch.setattr(GrammarCompiler, "renew", lambda self, again: renewed.append(again) or original(self, again))
    states = [compiler.start(grammar) for _ in range(3)]
    for token in expected:
        masks = [state.allowed() for state in states]
        assert all((mask == masks[0]).all() and mask[token] for mask in masks)
        for state in states:
            state.copy().forced()
            state.advance(token)
    assert renewed
    for state in states:
        assert np.flatnonzero(state.allowed()).tolist() == [END]
    assert grammar not in compiler._kept
    monkeypatch.setattr(module, "MAX_STATES", 5)
    with pytest.raises(GrammarError, match=r"regex: .*too many states"):
        compiler.start(Grammar("regex", "[a-z]{9}"))
