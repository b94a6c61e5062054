"""Outputs that follow the grammar of required calls are calls that match the schemas."""

import json

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, normalizers

from engine.api.fields import Tool
from engine.api.tool_formats import FORMATS, tool_grammar
from engine.models.tokenizer import Tokenizer
from engine.sampling.grammar import choice_grammar
from engine.sampling.grammar_state import GrammarCompiler
from tests.engine.api.tools.outputs import message_of, written

VOCAB, END = 4096, 0
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "<tool_call>", 'a "b"']},
        "days": {"$ref": "#/$defs/days"},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
}
CLOCK = {"properties": {"utc": {"type": "boolean"}}, "required": ["utc"], "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
    for name, schema in SCHEMAS.items()
]


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special token"])
def tokenizer(folder, model_folder, request):
    return Tokenizer(folder, ("<tool_call>",)) if request.param else Tokenizer(model_folder)


def output(compiler, tokenizer, grammar, rng, end=END):
    """A random output that the grammar allows; ends as soon as it may, and so does not repeat calls often."""
    state, tokens = compiler.start(grammar), []
    while end not in (allowed := np.flatnonzero(state.allowed())):
        token = int(rng.choice(allowed))
        assert state.accept(token)
        tokens.append(token)
        assert len(tokens) < 1000
    return tokenizer.decode(np.array(tokens, np.uint32))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("parallel", [False, True])
def test_every_output_of_the_grammar_is_calls_that_match(form, parallel, tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB, (END,))
    grammar = tool_grammar(form, TOOLS, tokenizer.token_ids(form.markers), parallel=parallel)
    rng = np.random.default_rng(1)
    called = set()
    for _ in range(10):
        text = output(compiler, tokenizer, grammar, rng)
        content, calls = message_of(form, text, SCHEMAS)
        assert not content
        assert calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        called |= {name for name, _ in calls}
        assert text == written(form, [(name, json.loads(arguments)) for name, arguments in calls])
    assert called == set(SCHEMAS)


def sentencepiece_folder(folder):
    """A tokenizer of the kind that Mistral's models have: bytes and special tokens are entries of the vocabulary."""
    special = ["<unk>", "<s>", "</s>", "[TOOL_CALLS]"]
    characters = ["\u2581", *(chr(code) for code in range(33, 127))]
    entries = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, "\u2581a", '{"']
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    merges = [("\u2581", "a"), ("{", '"')]
    tokenizer = HubTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, len(entries)


def test_required_calls_with_a_vocabulary_of_sentencepiece(tmp_path):
    form = FORMATS["mistral"]
    folder, size = sentencepiece_folder(tmp_path)
    tokenizer = Tokenizer(folder, form.markers)
    ids = tokenizer.token_ids(form.markers)
    assert ids == {"[TOOL_CALLS]": 3}
    compiler = GrammarCompiler(tokenizer, size, (2,))
    grammar = tool_grammar(form, TOOLS, ids, parallel=False)
    rng = np.random.default_rng(2)
    for _ in range(5):
        text = output(compiler, tokenizer, grammar, rng, end=2)
        content, [(name, arguments)] = message_of(form, text, SCHEMAS)
        assert not content
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    spelled = "é<unk>[TOOL_CALLS]</s>"
    assert output(compiler, tokenizer, choice_grammar([spelled]), rng, end=2) == spelled


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_several_calls_follow_the_grammar_only_if_parallel(form, model_folder):
    tokenizer = Tokenizer(model_folder)
    compiler = GrammarCompiler(tokenizer, VOCAB, (END,))
    text = written(form, [("clock", {"utc": True}), ("weather", {"city": "Paris", "days": 3})])
    for parallel in (True, False):
        state = compiler.start(tool_grammar(form, TOOLS, {}, parallel=parallel))
        accepted = [state.accept(token) for token in [*tokenizer.encode(text).tolist(), END]]
        assert all(accepted) == parallel


def test_a_marker_that_is_a_token_is_written_as_that_token(folder):
    tokenizer = Tokenizer(folder, ("<tool_call>",))
    ids = tokenizer.token_ids(FORMATS["hermes"].markers)
    assert ids == {"<tool_call>": VOCAB - 1}
    state = GrammarCompiler(tokenizer, VOCAB, (END,)).start(tool_grammar(FORMATS["hermes"], TOOLS, ids, parallel=False))
    assert np.flatnonzero(state.allowed()).tolist() == [VOCAB - 1]
    assert tokenizer.decode(np.array([VOCAB - 1], np.uint32)) == "<tool_call>"
    assert Tokenizer(folder).decode(np.array([VOCAB - 1], np.uint32)) == ""


def test_grammars_may_contain_the_spelling_of_a_special_token(folder):
    """The spelling is produced as text, not as the special token."""
    tokenizer = Tokenizer(folder)
    compiler = GrammarCompiler(tokenizer, VOCAB, (END,))
    for spelling in ("<tool_call>", "<|endoftext|>"):
        state, tokens = compiler.start(choice_grammar([f"a{spelling}b"])), []
        while forced := state.forced():
            assert all(state.accept(token) for token in forced)
            tokens += forced
        assert tokens.pop() == END
        assert tokenizer.decode(np.array(tokens, np.uint32)) == f"a{spelling}b"


def test_the_white_space_of_a_schema_is_kept():
    schema = {"x-guidance": {"whitespace_flexible": True}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
    grammar = tool_grammar(FORMATS["hermes"], [tool], {}, parallel=False)
    assert '"whitespace_flexible": true' in grammar.text
