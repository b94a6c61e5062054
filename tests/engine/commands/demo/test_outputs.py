"""Ends of outputs."""

import pytest

from engine.commands.demo.outputs import MAX_LINE, end_of_block, find_lengths
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
