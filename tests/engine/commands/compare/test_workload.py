"""Shares, order and edits of the workload, and ends of its outputs."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.commands.compare.workload import (
    MAX_LINE,
    edit_beginning,
    end_of_block,
    find_lengths,
    make_workload,
)
from engine.commands.prompts import read_texts
from engine.config import EngineConfig
from engine.engine import build_engine
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.errors import UserError

PROMPTS = [f"import os\n\n\ndef f{number}(x):\n    y = {number}\n" for number in range(130)]


@given(st.integers(0, 20))
def test_shares_are_exact_and_repeats_follow_their_originals(seed):
    items = make_workload(PROMPTS, 300, seed)
    assert Counter(item.kind for item in items) == {"exact repeat": 90, "near repeat": 90, "new": 120}
    seen = {}
    for item in items:
        if item.kind == "new":
            assert item.seed not in seen
            seen[item.seed] = item.prompt
        elif item.kind == "exact repeat":
            assert item.prompt == seen[item.seed]
        else:
            assert item.prompt != seen[item.seed]
            assert item.prompt.splitlines()[-1] == seen[item.seed].splitlines()[-1]


def test_the_share_of_repeats_grows():
    new = np.array([[item.kind == "new" for item in make_workload(PROMPTS, 300, seed)] for seed in range(20)])
    assert new[:, :30].mean() > 0.7
    assert 0.1 < new[:, -30:].mean() < 0.4


def test_the_seed_determines_the_workload():
    assert make_workload(PROMPTS, 50, 1) == make_workload(PROMPTS, 50, 1)
    assert make_workload(PROMPTS, 50, 1) != make_workload(PROMPTS, 50, 2)


def test_an_edit_keeps_most_of_a_prompt():
    prompt = "".join(f"line {number}\n" for number in range(12))
    for seed in range(50):
        edited = edit_beginning(prompt, random.Random(seed))
        assert edited.startswith("#")
        assert edited.endswith("".join(f"line {number}\n" for number in range(4, 12)))


def test_too_few_prompts_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="need 40 prompts; the file has 5"):
        make_workload(PROMPTS[:5], 100, 0)
    path = tmp_path / "prompts.jsonl"
    for text in ("{", "[]", json.dumps({"text": "x"}), json.dumps({"prompt": [5]}), json.dumps({"prompt": " "})):
        path.write_text(text + "\n")
        with pytest.raises(UserError, match="prompt"):
            read_texts(path)


# --- Ends of outputs

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
