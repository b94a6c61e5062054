"""Drafts never change a tool call: with any drafter, streamed or not, on the eager and on the graph executor."""

from itertools import cycle, islice

import numpy as np
import pytest

from engine.api.tools.definitions import Tool
from engine.api.tools.formats import FORMATS, ToolParser
from engine.api.tools.grammar import tool_grammar
from engine.api.tools.output import CallOutput
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.detokenize import Detokenizer
from engine.models.tokenizer import Tokenizer
from engine.sampling.grammar_state import GrammarCompiler
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from tests.engine.api.tools.outputs import collected, message_of, written
from tests.engine.conftest import VOCAB
from tests.engine.drafters.kinds import target_of

CITIES = ("Paris", 'a "b"', "{}", "é\\n")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "note": {"type": "string", "maxLength": 8}},
    "required": ["city", "note"],
    "additionalProperties": False,
}
OTHER = SCHEMA | {"properties": {"city": {"enum": CITIES[::-1]}, "note": {"type": "string", "pattern": "^a{9}$"}}}
NAMES = ("weather", "weather_at")
COUNT = 10
"""Requests of each kind, so that each format is used greedily and sampled."""


def tools(schema):
    return [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}}) for name in NAMES
    ]


def required(tokenizer, schema=SCHEMA):
    """Requests that must call a tool, greedy and sampled, in each format."""
    return [
        Request(
            tokenizer.encode(f"call {number % 3}"),
            SamplingParams(
                max_tokens=350, seed=number, temperature=(0.0, 1.0)[number % 2],
                grammar=tool_grammar(form, tools(schema), {}, parallel=False),
            ),
        )
        for number, form in enumerate(islice(cycle(FORMATS.values()), COUNT))
    ]  # fmt: skip


def recorded(tokenizer):
    """Requests whose outputs are recorded: content and calls, which differ between requests."""
    submitted = []
    for number, form in enumerate(islice(cycle(FORMATS.values()), COUNT)):
        calls = [(NAMES[number % 2], {"city": CITIES[number % 4], "note": "a" * number}), (NAMES[0], {})]
        text = ("" if form.name == "llama3_json" else "So: ") + written(form, calls)
        sampling = SamplingParams(max_tokens=400, seed=number, temperature=(0.0, 1.0)[number % 2])
        tokens = np.append(tokenizer.encode(text), 0).astype(np.uint32)
        submitted.append(Request(tokenizer.encode("call"), sampling, recorded=tokens))
    return submitted


def run(engine, tokenizer, submitted):
    """Return for each request its message, read as a whole and streamed step by step, and its completion."""
    forms = list(islice(cycle(FORMATS.values()), len(submitted)))
    outputs = [CallOutput(ToolParser(form, NAMES)) for form in forms]
    texts = [Detokenizer(tokenizer.decode, request.prompt) for request in submitted]
    deltas = [[] for _ in submitted]
    index_of = {engine.add(request): index for index, request in enumerate(submitted)}
    finished = {}
    while engine.scheduler.has_work:
        report = engine.step()
        finished |= report.finished
        for number, tokens in report.tokens.items():
            index = index_of[number]
            text = "".join(texts[index].feed(token) for token in tokens.tolist())
            deltas[index].append(outputs[index].delta(text, is_last=number in finished))
    completions = [finished[number] for number in index_of]
    contents = [tokenizer.decode(completion.content) for completion in completions]
    wholes = [message_of(form, content, NAMES) for form, content in zip(forms, contents, strict=True)]
    return wholes, [collected(each) for each in deltas], completions


def engine_with(kind, model, tokenizer, in_flight):
    config = EngineConfig(max_sequences=4, max_step_tokens=64, max_draft=6, in_flight=in_flight, kv_memory_mib=16)
    drafter = build_drafter(kind, DrafterConfig(), target_of(model.config))
    grammars = GrammarCompiler(tokenizer, VOCAB, model.config.eos_token_ids)
    return build_engine(model, config, drafter, tokenizer.decode, grammars=grammars)


@pytest.fixture(scope="module")
def expected(model, model_folder):
    """The messages without drafts, by kind of request."""
    tokenizer = Tokenizer(model_folder)
    engine = engine_with("none", model, tokenizer, 0)
    messages = {requests: run(engine, tokenizer, requests(tokenizer))[0] for requests in (required, recorded)}
    assert all(content is None and len(calls) == 1 for content, calls in messages[required])
    assert all(len(calls) == 2 for _, calls in messages[recorded])
    return messages


@pytest.mark.parametrize("in_flight", [0, 1], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", ["none", "ngram", "ssd"])
@pytest.mark.parametrize("requests", [required, recorded])
def test_drafts_never_change_a_tool_call(requests, kind, in_flight, model, model_folder, expected):
    tokenizer = Tokenizer(model_folder)
    engine = engine_with(kind, model, tokenizer, in_flight)
    # The corpus has other calls of the same tools, and then the same calls.
    run(engine, tokenizer, required(tokenizer, OTHER))
    for _ in range(2):
        submitted = requests(tokenizer)
        wholes, streamed, completions = run(engine, tokenizer, submitted)
        assert wholes == expected[requests]
        assert [(content or None, calls) for content, calls in streamed] == wholes
    if kind != "none":
        assert sum(completion.accepted for completion in completions) > 50
    engine.close()
