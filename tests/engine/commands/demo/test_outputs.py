"""Ends of outputs, and numbers of tokens in loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.commands.demo.outputs import (
    LOOP_PERIOD,
    LOOP_TOKENS,
    MAX_LINE,
    count_loop_tokens,
    end_of_block,
    find_lengths,
)
from engine.config import EngineConfig
from engine.engine import build_engine
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter

METHOD = "class A:\n    def f(self):\n        pass\n\n    async def g(self):\n        '''Do it.'''\n"


@pytest.mark.parametrize(
    ("prompt", "output", "rest"),
    [
        ("def f():\n", "    x = 1\n\n    return x\n\n\n", "def g():\n    pass\n"),
        ("def f():\n", "    return 1\n", "# comment"),
        ("def f():\n", "", "x = 1\n"),
        (METHOD, "        return 1\n", "    @property\n"),
        (METHOD, "        if x:\n            return 1\n        return 2\n", "\tx"),
        (METHOD, "        a()\n        b()\n", "        a()\n        c()\n"),
        (METHOD, "        a()\n            a()\n        b", None),  # the same statement, indented differently
        (METHOD, "        a()\n        a()", None),  # the line may be incomplete
        (METHOD, "        a()\n\n\n        b()\n", None),  # blank lines are no repetition
        ("x = [\n", "1,\n2,\n", "1,\n"),  # no function
        ("x = [\n", "1,\n2,\n3", None),
        ("def f():\n", "    " + "x" * (MAX_LINE - 4), "x"),
    ],
)
def test_an_output_ends_with_its_block(prompt, output, rest):
    end = end_of_block(prompt, output + (rest or ""))
    assert end == (None if rest is None else len(output))


def test_lengths_are_those_of_the_text_up_to_its_end(model, model_folder):
    tokenizer = Tokenizer(model_folder)
    prompts = [f"def f{number}(left, right):\n" for number in range(6)]
    sampling = SamplingParams(max_tokens=60, temperature=1.0)
    requests = [Request(tokenizer.encode(prompt), sampling) for prompt in prompts]
    whole = build_engine(model, EngineConfig(max_sequences=3), NoDrafter()).generate(requests)
    lengths = find_lengths(
        build_engine(model, EngineConfig(max_sequences=3), NoDrafter()), tokenizer, requests, prompts
    )
    for prompt, request, completion, length in zip(prompts, requests, whole, lengths, strict=True):
        texts = [
            tokenizer.decode_behind(request.prompt, completion.tokens[:n]) for n in range(len(completion.tokens) + 1)
        ]
        end = end_of_block(prompt, texts[-1])
        assert length == max(1, next((n for n, text in enumerate(texts) if end is not None and len(text) >= end), 60))
    assert min(lengths) < 60


def naive_loop_tokens(tokens):
    looping = set()
    for last in range(len(tokens)):
        run = range(last - LOOP_TOKENS + 1, last + 1)
        for period in range(1, LOOP_PERIOD + 1):
            if run[0] >= period and all(tokens[i] == tokens[i - period] for i in run):
                looping.update(run)
    return len(looping)


@given(
    st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 4)
)
def test_loop_tokens_are_counted(start, period, times):
    tokens = start + period * times
    assert count_loop_tokens(np.array(tokens, np.uint32)) == naive_loop_tokens(tokens)


def test_a_loop_is_counted_and_plain_text_is_not():
    assert count_loop_tokens(np.arange(128, dtype=np.uint32)) == 0
    assert count_loop_tokens(np.array([1, 2] * 30, np.uint32)) == 58
